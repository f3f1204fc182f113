"""Half precisions train like one process under any layout: losses of 200 steps of a model of more than 10 M parameters.

`make test` runs forty steps of a small model under the same bound; the 200 steps are slow.

The bound of 0.5 % was calibrated on two microbatchings of one process (micro-batch 4 against 1), which is what
rounding alone does to the same training: mean |Δloss| of the last 50 steps over their mean loss was 0.022 % in bf16
and 0.003 % in fp16. At five times the learning rate it was 1.4 %: there the training itself is chaotic, and no layout
could do better.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hethub.runtime.data import open_dataset
from hethub.runtime.loop.trainer import Trainer
from hethub.spec.job import DataSpec, TrainSpec
from hethub.spec.model import ModelSpec
from tests.support.layouts import Case, replica, stage
from tests.support.ranks import run_ranks

BOUND = 0.005
LICENSE = Path(__file__).resolve().parents[3] / "LICENSE"


@dataclass(frozen=True)
class Training:
    """A training whose last steps are compared; frozen, so that its reference is trained once."""

    model: ModelSpec
    steps: int
    last: int
    lr: float


def _model(name: str, hidden: int, ffn: int) -> ModelSpec:
    return ModelSpec(name=name, layers=4, hidden=hidden, heads=8, kv_heads=4, ffn=ffn, vocab=272, max_seq_len=64)


SHORT = Training(_model("small", 96, 256), steps=40, last=10, lr=1e-3)
LONG = Training(_model("ten-million", 480, 1280), steps=200, last=50, lr=2e-4)


def _case(training: Training, precision: str, *stages: dict[str, Any], **more: Any) -> Case:
    return Case(
        name=precision,
        stages=list(stages),
        precision=precision,
        model=training.model,
        seq_len=8,
        global_batch=4,
        steps=training.steps,
        **more,
    )


def layouts(training: Training, precision: str) -> list[Case]:
    pipeline = (stage((0, 2), replica([0, 1], 4, 2)), stage((2, 4), replica([2], 4, 2)))
    sharded = stage((0, 4), replica([0], 3, 1), replica([1], 1, 1), zero=1)
    return [_case(training, precision, *pipeline), _case(training, precision, sharded, vendors="an")]


def losses(world: Any, case: Case, lr: float) -> list[float]:
    """The losses of a training on a text that every Python has: what overflows in fp16, and for which microbatches, is
    the text's."""
    data = DataSpec(source="text", path=str(LICENSE))
    dataset = open_dataset(data, Path(), seq_len=case.seq_len, seed=1, vocab=case.model.vocab)
    train = TrainSpec(steps=case.steps, warmup_steps=case.steps // 10, lr=lr, min_lr=lr / 10)
    trainer = Trainer(case.layout(), world, dataset, train)
    trainer.initialise()
    return [trainer.run_step(step).loss for step in range(1, case.steps + 1)]


@functools.cache
def reference(training: Training, precision: str) -> list[float]:
    return run_ranks(1, losses, _case(training, precision).alone(), training.lr, timeout_seconds=600)[0]


def mean_difference(ours: list[float], theirs: list[float], last: int) -> float:
    """Mean |Δloss| of the last steps over their mean loss."""
    ours_last, theirs_last = np.array(ours[-last:]), np.array(theirs[-last:])
    return float(np.abs(ours_last - theirs_last).mean() / theirs_last.mean())


@pytest.mark.timeout(900)
@pytest.mark.parametrize("training", [SHORT, pytest.param(LONG, marks=pytest.mark.slow)], ids=["short", "long"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "index",
    [pytest.param(0, marks=pytest.mark.slow, id="tp2 to tp1"), pytest.param(1, id="dp2 over two islands, samples 3:1")],
)
def test_half_precision_trains_like_one_process(training: Training, precision: str, index: int) -> None:
    assert LONG.model.parameters >= 10_000_000
    case = layouts(training, precision)[index]
    results = run_ranks(case.size, losses, case, training.lr, islands=case.islands, timeout_seconds=600)
    one = reference(training, precision)
    assert np.mean(one[-training.last :]) < 0.75 * one[0]
    assert all(result == results[0] for result in results)
    assert mean_difference(results[0], one, training.last) <= BOUND
