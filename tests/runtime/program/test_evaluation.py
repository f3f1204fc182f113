"""Programs over the job's tokens: which of them a step takes, also of a resumed run, and the held-out loss, which is that of
the module in `.eval()`."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from hethub.runtime.loop.read import open_data
from hethub.runtime.state.learning_rate import learning_rate
from hethub.spec.job import load_job
from tests.support.command import check_refused, ranks
from tests.support.job_files import write_job

CODE = """
import torch
from torch import nn

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(260, 8), nn.SyncBatchNorm(8), nn.Linear(8, 260)
        self.drop, self.branch = nn.Dropout(0.0), nn.Linear(8, 8)

    def normed(self, values):
        return self.norm(values.transpose(1, 2)).transpose(1, 2)

    def forward(self, tokens, targets):
        values = self.drop(self.normed(self.table(tokens)))
        return nn.functional.cross_entropy(self.head(values).flatten(0, 1), targets.flatten())

class Branched(Words):
    # Its branch gives nothing before the first step.
    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.branch.weight)
        nn.init.zeros_(self.branch.bias)

    def forward(self, tokens, targets):
        values = self.table(tokens)
        values = values + self.branch(self.normed(values))
        return nn.functional.cross_entropy(self.head(values).flatten(0, 1), targets.flatten())

class Predicting(Words):
    # What it predicts, where it is not trained.
    def forward(self, tokens, targets):
        values = self.head(self.table(tokens))
        return nn.functional.cross_entropy(values.flatten(0, 1), targets.flatten()) if self.training else values.argmax(-1)

def frozen():
    module = Words()
    module.norm.running_mean.fill_(0.3)
    module.norm.eval()
    return module
"""
BATCHES = 3


def write(folder: Path, made: str) -> Path:
    nodes = [
        {"name": maker, "vendor": maker, "accelerator": "CPU-core", "accelerators": 1, "gbps_per_nic": 800}
        for maker in ("amd", "nvidia")
    ]
    path = write_job(
        folder, cluster={"nodes": nodes}, train={"precision": "fp64", "lr": 0.05, "steps": 3}, plan="hap",
        model_name=f"python:own_words:{made}",
        eval={"every_steps": 2, "batches": BATCHES, "data": {"source": "text", "path": "text.txt"}},
    )  # fmt: skip
    (folder / "own_words.py").write_text(CODE)
    return path


def test_the_held_out_loss_is_that_of_the_module_in_eval(tmp_path: Path) -> None:
    job = write(tmp_path / "job", "frozen")
    for ended in ranks(2, "train", job, "--run-dir", tmp_path / "run", cwd=tmp_path):
        assert ended.exit_code == 0, ended.stderr
    told = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    known = dict[str, Any]()
    exec(CODE, known)
    module = known["Words"]().double()
    saved = {f"weights/{name}": value for name, value in module.state_dict().items()}
    dcp.load(saved, checkpoint_id=tmp_path / "run" / "checkpoints" / "step-3", no_dist=True)
    module.eval()
    held_out = open_data(load_job(job), 260).held_out
    assert held_out is not None
    rows = [map(torch.from_numpy, held_out.batch(number, 8, 0, 8)) for number in range(BATCHES)]
    losses = [float(module(*each).detach()) for each in rows]
    assert [row.get("eval_loss") is not None for row in told] == [False, True, True]
    assert told[-1]["eval_loss"] == pytest.approx(sum(losses) / BATCHES, rel=1e-12)
    assert len(set(losses)) == BATCHES


@pytest.mark.parametrize("made", ["Words", "Branched", "Predicting"])
def test_a_held_out_loss_that_eval_does_not_have_is_refused(tmp_path: Path, made: str) -> None:
    """It was taken with the batch's own statistics, without a word."""
    job = write(tmp_path / made, made)
    results = ranks(2, "train", job, "--run-dir", tmp_path / "run", cwd=tmp_path)
    check_refused(
        results, "has another loss in .eval() than in training", "Remove eval, or let the factory call .eval()"
    )
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_goes_on_in_the_data_and_the_schedule_with_another_batch(tmp_path: Path) -> None:
    """Behind two steps of 8 samples come three of 4, from the seventeenth sample on, at rates that fall to the end it had."""
    job = write(tmp_path / "job", "frozen")
    given = ["--set", "train.steps=4", "--set", "train.warmup_steps=1", "--set", "eval=null"]
    for ended in ranks(2, "train", job, "--run-dir", tmp_path / "run", *given, cwd=tmp_path):
        assert ended.exit_code == 0, ended.stderr
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-4")
    resumed = [
        "train",
        job,
        "--resume",
        tmp_path / "run",
        *given,
        "--set",
        "train.steps=5",
        "--set",
        "train.global_batch=4",
    ]
    told = "the checkpoint was trained with seed 1, the job has 2"
    check_refused(ranks(2, *resumed, "--set", "train.seed=2", "--accept-changes", cwd=tmp_path), told)
    for ended in ranks(2, *resumed, "--accept-changes", cwd=tmp_path):
        assert ended.exit_code == 0, ended.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["tokens"] for row in rows] == [8 * 32, 8 * 32, 4 * 32, 4 * 32, 4 * 32]
    settings, data = load_job(job).spec.train.replace(steps=4, warmup_steps=1), open_data(load_job(job), 260).training
    known = dict[str, Any]()
    exec(CODE, known)
    torch.manual_seed(settings.seed)
    module = known["frozen"]().double()
    groups = [
        {"params": [p for p in module.parameters() if p.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in module.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=settings.betas, eps=settings.eps)
    batches = [data.batch(0, 8, 0, 8), data.batch(1, 8, 0, 8), *(data.batch(number, 4, 0, 4) for number in (4, 5, 6))]
    for step, (batch, row) in enumerate(zip(batches, rows, strict=True), 1):
        optimizer.zero_grad()
        loss = module(*map(torch.from_numpy, batch))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), settings.grad_clip or 0.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step)
        optimizer.step()
        assert row["lr"] == pytest.approx(learning_rate(settings, step), rel=1e-12)
        assert row["loss"] == pytest.approx(float(loss.detach()), rel=1e-10)


def test_a_run_does_not_go_on_in_other_data(tmp_path: Path) -> None:
    job = write(tmp_path / "job", "frozen")
    for ended in ranks(2, "train", job, "--run-dir", tmp_path / "run", "--set", "train.steps=2", cwd=tmp_path):
        assert ended.exit_code == 0, ended.stderr
    text = job.parent / "text.txt"
    text.write_text(text.read_text().replace("square", "second power"))
    given = ("train", job, "--resume", tmp_path / "run", "--accept-changes")
    check_refused(ranks(2, *given, cwd=tmp_path), "the checkpoint was trained with data")
