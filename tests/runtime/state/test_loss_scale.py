"""The loss scale of fp16 finds the largest power of two that does not overflow."""

from typing import Any

import pytest

from hethub.runtime.state.loss_scale import LossScale, initial_scale
from tests.support.layouts import Case, build_trainer, replica, stage
from tests.support.ranks import run_ranks


def test_loss_scale_halves_on_overflow_and_doubles_after_patience() -> None:
    scale = LossScale("fp16", initial=8.0, patience=3)
    seen = []
    for overflow in (True, False, False, True, False, False, False, False, True, True, True, True):
        scale.update(overflow=overflow)
        seen.append(scale.value)
    assert seen == [4, 4, 4, 2, 2, 2, 4, 4, 2, 1, 1, 1]  # never below 1
    again = []
    for _ in range(7):
        scale.update(overflow=False)
        again.append(scale.value)
    assert again == [1, 1, 2, 2, 2, 4, 4]  # every third good step
    plain = LossScale("bf16")
    plain.update(overflow=True)
    assert (plain.value, plain.dynamic) == (1.0, False)


def test_an_overflow_is_the_gradients_own_fault_at_scale_1_alone() -> None:
    """There the run ends; at 2 the scale can still be halved."""
    scale = LossScale("fp16", initial=2.0)
    assert not scale.is_lowest
    scale.update(overflow=True)
    assert scale.is_lowest
    assert LossScale("bf16").is_lowest


def test_a_runs_scale_doubles_with_the_thousandth_good_step() -> None:
    scale = LossScale("fp16", initial=8.0)
    seen = []
    for _ in range(1001):
        scale.update(overflow=False)
        seen.append(scale.value)
    assert seen == [8.0] * 999 + [16.0] * 2


@pytest.mark.parametrize(("tokens", "power"), [(128, 16), (4096, 16), (8191, 16), (8192, 17), (2**20, 24), (2**24, 28)])
def test_a_token_counts_as_much_in_large_steps(tokens: int, power: int) -> None:
    """The backward starts at the scale over the step's tokens: of 2^24 tokens it was 1/256, where fp16 loses small gradients."""
    assert initial_scale(tokens) == 2.0**power
    assert tokens < 4096 or 8 < initial_scale(tokens) / tokens <= 16


def starts_at(world: Any, case: Case) -> float:
    return float(build_trainer(world, case).loss_scale.value)


@pytest.mark.parametrize(("precision", "scale"), [("fp16", 2.0**18), ("bf16", 1.0)])
def test_a_run_starts_at_the_scale_of_its_step(precision: str, scale: float) -> None:
    stages = [stage((0, 4), replica([0], 512))]
    case = Case(name="large", stages=stages, precision=precision, global_batch=512, seq_len=32)
    assert run_ranks(1, starts_at, case) == [scale]
