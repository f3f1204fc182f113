"""Jobs under programs that keep weights in pieces, which no search would choose for models as narrow: steps, checkpoints and
resumed runs as of one process with torch's own AdamW."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from hethub.runtime.program.planned import plan_program, trace_job
from hethub.runtime.program.subject import open_subject
from hethub.runtime.state.learning_rate import learning_rate
from hethub.spec.job import load_job
from hethub.spec.program import program_plan_text
from hethub.synthesis.graph import Graph
from hethub.synthesis.layout import Layout
from hethub.synthesis.program import Program
from hethub.synthesis.rules import WHOLE, Cut
from tests.support.command import ranks
from tests.support.job_files import write_job
from tests.synthesis.exact import random_program

CODE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(16, 24, bias=False), nn.SyncBatchNorm(24)
        self.second, self.tied = nn.Linear(24, 24), nn.Linear(24, 24, bias=False)
        self.tied.weight, self.pair = self.second.weight, nn.Linear(24, 48)
        self.scale, self.cube = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.randn(2, 24, 6) * 0.3)
        self.unused, self.frozen = nn.Parameter(torch.randn(3, 5)), nn.Parameter(torch.randn(6), requires_grad=False)
        self.register_buffer("unread", torch.randn(4))

    def forward(self, values, labels):
        x = self.norm(self.first(values)).tanh()
        left, right = self.pair(x).unflatten(-1, (2, 24)).unbind(1)  # whose weight is cut in two blocks
        x = self.tied(self.second(left * right).tanh()) * self.scale
        return nn.functional.cross_entropy(torch.einsum("bi,kio->bko", x, self.cube).sum(1) + self.frozen, labels)

def make(train):
    def batches():
        draw = torch.Generator().manual_seed(train.seed)
        while True:
            labels = torch.randint(6, (train.global_batch,), generator=draw)
            yield torch.randn(train.global_batch, 16, generator=draw), labels
    return Net(), batches()
"""
# Each far from torch's default and from the job's, and each decides a digit that is compared.
SETTINGS = {
    "steps": 6, "precision": "fp64", "lr": 0.02, "min_lr": 0.005, "warmup_steps": 2, "weight_decay": 0.3, "betas": [0.7, 0.8],
    "eps": 0.01, "grad_clip": 0.05, "schedule": "linear",
}  # fmt: skip
HALF, END = 3, 6
MOMENTS = ("exp_avg", "exp_avg_sq")
Named = dict[str, torch.Tensor]


def write(folder: Path, size: int, first_seed: int) -> tuple[Path, Path]:
    """A job for so many ranks, and a plan file of it under a drawn program."""
    nodes = [
        {"name": maker, "vendor": maker, "accelerator": "CPU-core", "accelerators": own, "gbps_per_nic": 800}
        for maker, own in (("amd", 1), ("nvidia", size - 1))
    ]
    path = write_job(
        folder, cluster={"nodes": nodes}, train=SETTINGS, plan="hap", model_name="python:own_cut:make",
        checkpoint={"every_steps": HALF, "keep": 5},
    )  # fmt: skip
    (folder / "own_cut.py").write_text(CODE)
    job = load_job(path)
    assert job.cluster is not None
    subject = open_subject(job, with_values=False)
    graph = trace_job(job, subject)
    drawn = (random_program(graph, job.cluster, seed) for seed in range(first_seed, first_seed + 2000))
    program = next(program for program in drawn if in_pieces(graph, program))
    plan = plan_program(job, subject, graph, job.cluster).plan
    (folder / "drawn.yaml").write_text(program_plan_text(plan.replace(program=program.to_spec())))
    return path, folder / "drawn.yaml"


def in_pieces(graph: Graph, program: Program) -> bool:
    """Whether several ranks have pieces of a weight in blocks, of another in one, and of a vector; and all ranks a whole one."""
    laid, wanted = Layout.planned(graph, program), {"pair.weight": 2, "cube": 1}
    for name, blocks in wanted.items():
        state = program.kept[name]
        if not isinstance(state, Cut) or state.blocks != blocks:
            return False
        if sum(own > 0 for own in laid.of(graph.parameters[name], state)) < 2:
            return False
    return isinstance(program.kept["norm.weight"], Cut) and program.kept["first.weight"] == WHOLE


def train(size: int, *arguments: Any, cwd: Path) -> None:
    for ended in ranks(size, "train", *arguments, cwd=cwd):
        assert ended.exit_code == 0, ended.stderr


def told(run: Path) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(row["loss"], row["grad_norm"]) for row in rows]


def saved(run: Path, step: int) -> Named:
    """Every entry of a checkpoint, read by torch alone."""
    folder = run / "checkpoints" / f"step-{step}"
    known = FileSystemReader(folder).read_metadata().state_dict_metadata
    found = {key: torch.empty(own.size, dtype=own.properties.dtype) for key, own in known.items()}  # type: ignore[union-attr]
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    return found


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A job, its drawn program and its run on three ranks, saved at steps 3 and 6."""
    folder = tmp_path_factory.mktemp("cut")
    job, plan = write(folder / "job", 3, 40)
    train(3, job, "--plan", plan, "--run-dir", folder / "run", cwd=folder)
    return job, plan, folder / "run"


@pytest.fixture(scope="module")
def one_process(cut: tuple[Path, Path, Path]) -> tuple[list[tuple[float, float]], Named]:
    """Losses and norms, and all that a checkpoint at the end has."""
    settings, known = load_job(cut[0]).spec.train, dict[str, Any]()
    assert settings.grad_clip is not None
    exec(CODE, known)
    torch.manual_seed(settings.seed)
    module, batches = known["make"](settings)
    module.double()
    groups = [
        {"params": [p for p in module.parameters() if p.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in module.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer, steps = torch.optim.AdamW(groups, betas=settings.betas, eps=settings.eps), []
    for step in range(1, settings.steps + 1):
        values, labels = next(batches)
        optimizer.zero_grad()
        loss = module(values.double(), labels)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), settings.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step)
        optimizer.step()
        steps.append((float(loss.detach()), float(norm)))
    held = {f"weights/{name}": value for name, value in module.state_dict().items() if name != "tied.weight"}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            own = optimizer.state.get(parameter) or dict.fromkeys(MOMENTS, torch.zeros_like(parameter))
            held |= {f"{kind}/{name}": own[kind] for kind in MOMENTS}
    return steps, held


def check(run: Path, one_process: tuple[list[tuple[float, float]], Named]) -> None:
    steps, held = one_process
    for (loss, norm), (wanted, wanted_norm) in zip(told(run), steps, strict=True):
        assert loss == pytest.approx(wanted, rel=1e-10)
        assert norm == pytest.approx(wanted_norm, rel=1e-10)
    found = saved(run, END)
    assert found.keys() == held.keys()
    for name, value in held.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


def test_pieces_are_stepped_clipped_and_saved_as_in_one_process(cut: tuple[Path, Path, Path], one_process: Any) -> None:
    """The moments too: what a next step makes of them does not show in the weights of this one."""
    assert {norm > SETTINGS["grad_clip"] for _, norm in one_process[0]} == {True}
    check(cut[2], one_process)


def test_a_resumed_run_in_pieces_has_the_same_bits(cut: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """Of all that it saves: a loss does not tell whether running statistics were taken up, or the last step's moments."""
    job, plan, run = cut
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{END}")
    train(3, job, "--plan", plan, "--resume", tmp_path / "run", cwd=tmp_path)
    assert told(tmp_path / "run") == told(run)
    before, after = saved(run, END), saved(tmp_path / "run", END)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_run_in_pieces_goes_on_in_others_on_fewer_ranks(
    cut: tuple[Path, Path, Path], one_process: Any, tmp_path: Path
) -> None:
    shutil.copytree(cut[2], tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{END}")
    job, plan = write(tmp_path / "fewer", 2, 130)
    train(2, job, "--plan", plan, "--resume", tmp_path / "run", cwd=tmp_path)
    check(tmp_path / "run", one_process)
