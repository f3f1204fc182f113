"""Against transformers' LlamaForCausalLM, MistralForCausalLM and torch's AdamW on the same tokens: logits, five losses, export."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from hethub.runtime.checkpoint import CheckpointManager
from hethub.runtime.checkpoint.export import export
from hethub.runtime.model.initial import load_hugging_face
from hethub.runtime.model.layers import rms_norm
from hethub.runtime.model.stage import MicrobatchInput, Stage
from hethub.runtime.model.tensor_parallel import column_parallel
from hethub.runtime.run_folder import RunFolder
from hethub.spec.hugging_face import from_hugging_face
from hethub.spec.model import ModelSpec
from tests.support.layouts import Case, Shards, build_trainer, random_tokens, replica, shards, stage
from tests.support.ranks import run_ranks

if TYPE_CHECKING:  # each rank imports this module, and transformers takes seconds
    from transformers import LlamaForCausalLM

TOLERANCE = 1e-5
LLAMA_31 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
ALONE = [stage((0, 4), replica([0], 8, 4))]
TP2 = [stage((0, 4), replica([0, 1], 8, 2))]
PP2 = [stage((0, 3), replica([0], 8, 2)), stage((3, 4), replica([1], 8, 4))]
DP2 = [stage((0, 4), replica([0], 6, 2), replica([1], 2), zero=1)]


def tiny(**changes: Any) -> LlamaForCausalLM:
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    mistral = "sliding_window" in changes
    config_class, model_class = (MistralConfig, MistralForCausalLM) if mistral else (LlamaConfig, LlamaForCausalLM)
    shape = {
        "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "initializer_range": 0.1,
    }  # fmt: skip
    torch.manual_seed(0)
    return model_class(config_class(**{**shape, **changes}))  # type: ignore[return-value]


def case_of(stages: list[dict[str, Any]], model: ModelSpec) -> Case:
    return Case(name="parity", stages=stages, model=model, precision="fp32", seq_len=24)


def batch(case: Case, step: int) -> NDArray[np.int64]:
    """The rows (batch, seq + 1) that every plan trains on at `step`."""
    return random_tokens(case).samples(step - 1, case.global_batch, 0, case.global_batch)


@torch.no_grad()
def logits_of(stage: Stage, data: MicrobatchInput) -> torch.Tensor:
    """The rank's columns of the logits, (batch * seq, vocab_local), of a stage that is the model."""
    x, tokens = stage.embed(data), stage.token_layout(data)
    for layer in stage.layers:
        x = layer(x, tokens)
    assert stage.norm is not None
    assert stage.head is not None
    return column_parallel(rms_norm(x, stage.norm, stage.eps), stage.group, (stage.head,))[0]


def ours(
    world: Any, case: Case, folder: Path, run: Path
) -> tuple[NDArray[np.float32], list[float], list[float], Shards]:
    """This rank's columns of the logits before training, losses and norms of five steps, and its weights at the end."""
    trainer = build_trainer(world, case)
    load_hugging_face(trainer.storage, case.model, folder)
    trainer.optimizer.reload_masters()
    logits = np.empty((0, 0), np.float32)
    if len(case.stages) == 1:
        tokens = torch.from_numpy(batch(case, 1)[:, :-1])
        logits = logits_of(trainer.stage, MicrobatchInput(batch=case.global_batch, tokens=tokens)).numpy()
    outcomes = [trainer.run_step(step) for step in range(1, 6)]
    store = CheckpointManager(RunFolder(run).checkpoints, 1, world)
    trainer.save(store, 5, blocking=True)
    norms = [outcome.grad_norm or math.nan for outcome in outcomes]
    return logits, [outcome.loss for outcome in outcomes], norms, shards(trainer)


def theirs(model: LlamaForCausalLM, case: Case) -> tuple[NDArray[np.float32], list[float], list[float]]:
    """Logits before training, losses and norms of five steps by a plain PyTorch loop."""
    matrices = [weight for weight in model.parameters() if weight.ndim == 2]
    norms = [weight for weight in model.parameters() if weight.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    first = torch.from_numpy(batch(case, 1)[:, :-1])
    with torch.no_grad():
        logits = model(first).logits.flatten(0, 1).numpy()
    losses, grad_norms = [], []
    for step in range(1, 6):
        rows = torch.from_numpy(batch(case, step))
        output = model(rows[:, :-1]).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(output, rows[:, 1:].flatten())
        loss.backward()
        grad_norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        for group in adamw.param_groups:
            cosine = 0.5 * (1 + math.cos(math.pi * (step - 2) / (20 - 2)))
            group["lr"] = 0.01 * step / 2 if step <= 2 else 0.001 + 0.009 * cosine
        adamw.step()
        adamw.zero_grad()
        losses.append(loss.item())
    return logits, losses, grad_norms


@pytest.mark.parametrize(
    ("changes", "layouts"),
    [
        ({}, [ALONE, DP2]),
        ({"num_key_value_heads": 4, "rope_parameters": LLAMA_31}, [ALONE, TP2]),
        ({"tie_word_embeddings": True, "num_key_value_heads": 2}, [ALONE, PP2]),
        pytest.param({"sliding_window": 5, "num_key_value_heads": 4}, [ALONE, TP2], marks=pytest.mark.slow),
    ],
    ids=["plain, dp2", "grouped with llama 3.1 rope, tp2", "tied head, pp2", "mistral's window, tp2"],
)
def test_training_is_that_of_transformers(
    tmp_path: Path, changes: dict[str, Any], layouts: list[list[dict[str, Any]]]
) -> None:
    reference = tiny(**changes)
    reference.save_pretrained(tmp_path / "hf")
    model = from_hugging_face(tmp_path / "hf")
    logits, losses, norms = theirs(reference, case_of(ALONE, model))
    for number, stages in enumerate(layouts):
        case, run = case_of(stages, model), tmp_path / f"run{number}"
        results = run_ranks(case.size, ours, case, tmp_path / "hf", run)
        check_logits([own for own, _, _, _ in results], logits, case)
        for _, own_losses, own_norms, _ in results:
            assert own_losses == pytest.approx(losses, rel=TOLERANCE)
            assert own_norms == pytest.approx(norms, rel=TOLERANCE)
        assert losses[-1] < losses[0]
        check_export(run, tmp_path / f"export{number}", [held for _, _, _, held in results], case)


def check_logits(parts: list[NDArray[np.float32]], reference: NDArray[np.float32], case: Case) -> None:
    if len(case.stages) == 1:
        whole = np.concatenate(parts, axis=1) if case.stages[0]["replicas"][0]["ranks"] == [0, 1] else parts[0]
        assert np.abs(whole - reference).max() <= TOLERANCE


def check_export(run: Path, to: Path, held: list[Shards], case: Case) -> None:
    """The exported folder loads in transformers with the very bits that were trained, and computes."""
    from transformers import AutoModelForCausalLM

    assert export(run, to) == f"step 5 of {run}"
    loaded = AutoModelForCausalLM.from_pretrained(to)
    assert loaded.config.tie_word_embeddings == case.model.tied_head
    assert getattr(loaded.config, "sliding_window", None) == case.model.sliding_window
    weights = dict(loaded.named_parameters())
    seen = set()
    for name, start, stop, values in (shard for own in held for shard in own):
        stored = weights[name].detach()
        stored = stored.t() if name.endswith(("o_proj.weight", "down_proj.weight")) else stored
        assert np.array_equal(stored.reshape(-1)[start:stop].numpy(), values), name
        seen.add(name)
    assert seen == set(weights)
    with torch.no_grad():
        assert torch.isfinite(loaded(torch.from_numpy(batch(case, 1))).logits).all()
