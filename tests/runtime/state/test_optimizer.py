"""AdamW with and without masters, against torch and by hand, and steps that an overflow skips."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hethub.runtime.model.huggingface import write_folder
from hethub.runtime.state.learning_rate import learning_rate
from hethub.runtime.state.optimizer import _batches
from hethub.spec.errors import RunFailed
from hethub.spec.layout.tensors import model_tensors
from hethub.spec.ranges import Range
from tests.support.layouts import MODEL, Case, build_trainer, chunked, replica, shards, stage
from tests.support.ranks import run_ranks, start_ranks

DP2 = [stage((0, 4), replica([0], 6, 2), replica([1], 2), zero=1)]
CHUNKS = [chunked([(0, 2), (2, 4)], replica([0], 6, 2), replica([1], 2), zero=1)]
ONE = [stage((0, 4), replica([0], 8, 4))]


def snapshot(trainer: Any) -> tuple[Any, list[Tensor]]:
    trainer.flush()
    masters = [run.master.detach().clone() for run in trainer.optimizer.runs]
    return trainer.storage.weights.clone(), masters


def overflow_and_recover(world: Any, case: Case) -> list[tuple[bool, bool, float | None, float, int]]:
    """Per step: weights unchanged, masters unchanged, norm, loss scale, updates taken."""
    trainer = build_trainer(world, case)
    trainer.loss_scale.value = 2.0**40
    rows = []
    for step in range(1, 31):
        weights, masters = snapshot(trainer)
        outcome = trainer.run_step(step)
        trainer.flush()
        same = torch.equal(weights, trainer.storage.weights)
        same_masters = all(torch.equal(a, run.master) for a, run in zip(masters, trainer.optimizer.runs, strict=True))
        rows.append((same, same_masters, outcome.grad_norm, trainer.loss_scale.value, trainer.updates))
    return rows


@pytest.mark.parametrize(
    "case",
    [
        Case(name="at the end", stages=DP2, precision="fp16"),
        Case(name="by chunks", stages=CHUNKS, precision="fp16", schedule="ministages", train={"grad_clip": None}),
    ],
    ids=lambda case: case.name,
)
def test_fp16_overflow_skips_the_step_on_all_ranks(case: Case) -> None:
    """Also where nothing is clipped and each chunk is stepped by itself: another one may have overflowed."""
    first, second = run_ranks(2, overflow_and_recover, case)
    assert [row[2:] for row in first] == [row[2:] for row in second]
    skipped = [row for row in first if row[2] is None]
    assert 3 < len(skipped) < 28  # it overflowed, and found a scale that does not
    for same, same_masters, norm, _, _ in [*first, *second]:
        assert same == (norm is None)
        assert same_masters == (norm is None)
    assert first[-1][4] == 30 - len(skipped)
    assert first[-1][3] == 2.0 ** (40 - len(skipped))


def start_from_a_folder(world: Any, case: Case, folder: Path) -> list[bool]:
    """Per tensor that this rank steps a part of: whether the master is the folder's, and the weight is that rounded."""
    trainer = build_trainer(world, case)
    trainer.load_hugging_face(folder)
    given, rows = load_file(folder / "model.safetensors"), []
    for run in trainer.optimizer.runs:
        masters, weights = run.master, run.weight
        for placed, part in run.axis:
            info = placed.info
            whole = (given[info.name].t() if info.split_dim == 1 else given[info.name]).reshape(-1)
            own = whole[slice(*part.shift(-placed.span.start))]
            rows.append(torch.equal(masters[: part.size], own) and torch.equal(weights[: part.size], own.bfloat16()))
            masters, weights = masters[part.size :], weights[part.size :]
    return rows


def test_masters_are_what_a_hugging_face_folder_says_not_rounded(tmp_path: Path) -> None:
    tensors = ((info.name, torch.randn(info.shape)) for info in model_tensors(MODEL))
    write_folder(tmp_path / "hf", MODEL, tensors, torch.float32)
    stages = [stage((0, 2), replica([0, 1], 8, 4), zero=1), stage((2, 4), replica([2], 5, 2), replica([3], 3), zero=3)]
    case = Case(name="bf16", stages=stages, precision="bf16")
    for rows in run_ranks(4, start_from_a_folder, case, tmp_path / "hf"):
        assert rows
        assert all(rows)


def train_not_finite(world: Any, case: Case) -> None:
    trainer = build_trainer(world, case)
    trainer.storage.weights.fill_(math.inf)
    trainer.run_step(1)


def test_a_gradient_that_is_not_finite_ends_other_precisions() -> None:
    outcomes = start_ranks(
        1, train_not_finite, Case(name="inf", stages=ONE, precision="bf16"), connect={"timeout_seconds": 60}
    )
    assert outcomes[0].error is not None
    assert outcomes[0].error[0] == RunFailed.__name__
    assert "step 1: the gradient is not finite" in outcomes[0].error[1]


def train_small_steps(world: Any, case: Case) -> tuple[bool, list[Any], np.ndarray, int]:
    """Whether there are masters; weights before; masters after; and how many weights moved."""
    trainer = build_trainer(world, case)
    before = trainer.storage.weights.clone()
    for step in range(1, case.steps + 1):
        trainer.run_step(step)
    masters = np.concatenate([run.master.detach().numpy() for run in trainer.optimizer.runs])
    moved = int((trainer.storage.weights != before).sum())
    return trainer.optimizer.keeps_masters, shards(trainer), masters, moved


def test_masters_collect_steps_too_small_for_bf16() -> None:
    """At a rate of 1e-6 a bf16 weight of 0.05 cannot move in one step; its fp32 master does, every step."""
    tiny_steps = {"lr": 1e-6, "min_lr": 1e-6, "warmup_steps": 0, "weight_decay": 0.0, "grad_clip": None}
    results = {}
    for precision in ("fp32", "bf16"):
        case = Case(name=precision, stages=ONE, precision=precision, steps=4, train=tiny_steps)
        results[precision] = run_ranks(1, train_small_steps, case)[0]
    assert results["fp32"][0] is False
    keeps, _, masters, moved = results["bf16"]
    assert keeps is True
    assert masters.dtype == np.float32
    assert moved < 0.2 * masters.size  # most weights round back to where they were
    start = run_ranks(1, train_small_steps, Case(name="start", stages=ONE, precision="bf16", steps=0))[0][2]
    assert (masters != start).mean() > 0.9
    assert np.abs(masters - start).max() <= 4.1e-6


def adamw_by_hand(world: Any, case: Case) -> tuple[float, float]:
    """Largest difference of weights and of moments between our optimizer and torch's plain AdamW on our gradients."""
    trainer = build_trainer(world, case)
    storage, train = trainer.storage, trainer.train
    plain = {name: torch.nn.Parameter(own.weight.clone()) for name, own in storage.parameters.items()}
    decays = {name: placed.info.decays for placed, _ in storage.held for name in [placed.info.name]}
    groups = [
        {"params": [w for name, w in plain.items() if decays[name] == kind], "weight_decay": train.weight_decay * kind}
        for kind in (True, False)
    ]
    adamw = torch.optim.AdamW(groups, betas=train.betas, eps=train.eps, foreach=False)
    for step in range(1, case.steps + 1):
        trainer.run_step(step)
        for name, own in storage.parameters.items():
            plain[name].grad = own.grad.clone()  # clipped already
        for group in adamw.param_groups:
            group["lr"] = learning_rate(train, step)
        adamw.step()
    weights = max(float((plain[name] - own.weight).abs().max()) for name, own in storage.parameters.items())
    first = sorted(float(adamw.state[w]["exp_avg"].double().square().sum()) for w in plain.values())
    ours = sum(float(run.exp_avg.double().square().sum()) for run in trainer.optimizer.runs)
    return weights, abs(ours - sum(first)) / sum(first)


def test_a_step_is_torchs_adamw_on_the_clipped_gradient() -> None:
    weights, moments = run_ranks(1, adamw_by_hand, Case(name="adamw", stages=ONE))[0]
    assert weights <= 1e-14
    assert moments <= 1e-12


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function._schema.name)
        return function(*args, **(kwargs or {}))


def clipped_step(world: Any, case: Case) -> tuple[bool, float]:
    """Whether a step with a scale has a pass over gradients of its own, and how far its weights are from torch's step of
    gradients that were scaled before."""
    trainer, scale, worst = build_trainer(world, case), 0.37, 0.0
    optimizer, grads = trainer.optimizer, trainer.storage.grads
    grads.copy_(torch.randn(grads.shape, generator=torch.Generator().manual_seed(0), dtype=grads.dtype))
    plain = [run.master.detach().clone().requires_grad_() for run in optimizer.runs]
    for leaf, run in zip(plain, optimizer.runs, strict=True):
        leaf.grad = optimizer.gradient(run) * scale
    with Operations() as operations:
        optimizer.step_runs(optimizer.runs, 1, scale)
    train = trainer.train
    for leaf, run in zip(plain, optimizer.runs, strict=True):
        decay = train.weight_decay * run.bucket.decays
        torch.optim.AdamW(
            [leaf], lr=optimizer.schedule.rate(1), betas=train.betas, eps=train.eps, weight_decay=decay
        ).step()
        worst = max(worst, float((leaf - run.master).abs().max() / leaf.detach().abs().max()))
    return "aten::mul_" in operations.names, worst


def test_a_step_scales_gradients_on_its_way() -> None:
    """In one pass; fp64 in one of its own, since torch's fused step takes the scale in fp32."""
    for precision, apart, tolerance in (("fp32", False, 1e-6), ("bf16", False, 1e-6), ("fp64", True, 1e-14)):
        ((own_pass, worst),) = run_ranks(1, clipped_step, Case(name="clip", stages=ONE, precision=precision))
        assert own_pass == apart
        assert worst <= tolerance


def owned_runs(world: Any, case: Case) -> tuple[int, int, int]:
    """How many pieces this rank steps a part of, how many runs that is on the flat axis, and how many it steps."""
    trainer = build_trainer(world, case)
    owned = [found for piece in trainer.reducer.pieces if (found := piece.piece.owned_runs(world.rank))]
    return len(owned), sum(map(len, owned)), len(trainer.optimizer.runs)


def test_what_is_brought_at_once_is_as_much_as_fits() -> None:
    """Of runs in their order; a run that is larger alone comes alone."""
    runs: list[Any] = [SimpleNamespace(local=Range(0, size)) for size in (4, 6, 1, 9, 12, 3)]
    assert [[run.local.size for run in batch] for batch in _batches(runs, 10)] == [[4, 6], [1, 9], [12], [3]]
    assert list(_batches([], 10)) == []


def test_runs_that_touch_in_storage_are_stepped_as_one() -> None:
    """However often a cut tensor parts them on the flat axis: each would be a tensor more for every pass over them."""
    case = Case(name="tp2", stages=[stage((0, 4), replica([0, 1], 8, 4))], bucket_elements=1 << 20)
    for pieces, apart, stepped in run_ranks(2, owned_runs, case):
        assert apart > pieces
        assert stepped == pieces
