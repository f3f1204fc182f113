"""A run that starts from a Hugging Face folder trains that very model, and gives it back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.support.command import one, ranks
from tests.support.job_files import MODEL, plan, write_job
from tests.support.plain_llama import transformers


def folder_of(path: Path) -> Any:
    """A tiny Llama of transformers, saved."""
    config = transformers().LlamaConfig(
        vocab_size=MODEL["vocab"], hidden_size=MODEL["hidden"], intermediate_size=MODEL["ffn"],
        num_hidden_layers=MODEL["layers"], num_attention_heads=MODEL["heads"], num_key_value_heads=MODEL["kv_heads"],
        max_position_embeddings=MODEL["max_seq_len"], tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(5)
    model = transformers().LlamaForCausalLM(config)
    model.save_pretrained(path)
    return model


def test_weights_come_from_the_folder_and_return_to_one(tmp_path: Path) -> None:
    theirs = folder_of(tmp_path / "tiny")
    still = {"steps": 1, "lr": 0.0, "min_lr": 0.0}  # a step that moves nothing, so the export must be what was loaded
    job = write_job(
        tmp_path, plan_file=plan(), train=still, plan="plan.yaml", checkpoint={"every_steps": None, "keep": 1}
    )
    content = {**yaml.safe_load(job.read_text()), "model": "hf:tiny"}
    job.write_text(yaml.safe_dump(content))
    run, back = tmp_path / "run", tmp_path / "back"
    for ended in ranks(4, "train", job, "--run-dir", run, cwd=tmp_path):
        assert ended.exit_code == 0, ended.stderr
    assert one(ranks(1, "export", run, "--to", back, cwd=tmp_path)).exit_code == 0
    ours = transformers().LlamaForCausalLM.from_pretrained(back).state_dict()
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours[name], value), name
    # A fresh model of this size would not have this loss: it is that of the folder's weights on the first batch.
    (line,) = (run / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["loss"] == pytest.approx(first_loss(theirs, content, tmp_path), abs=1e-4)


def first_loss(model: Any, job: dict[str, Any], base: Path) -> float:
    """What transformers itself says of the first batch."""
    from hethub.runtime.data import open_dataset
    from hethub.spec.job import DataSpec

    train = job["train"]
    dataset = open_dataset(
        DataSpec(**job["data"]), base, seq_len=train["seq_len"], seed=train.get("seed", 1), vocab=MODEL["vocab"]
    )
    tokens = torch.from_numpy(dataset.samples(0, train["global_batch"], 0, train["global_batch"]))
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))
