"""What a schedule may not change: the bits of the result, where microbatches come in one order. And what it keeps of
microbatches."""

import gc
from typing import Any

import pytest

from tests.support.layouts import MODEL, SEQ_LEN, Case, Shards, build_trainer, chunked, replica, shards, stage
from tests.support.ranks import run_ranks

ONE_CHUNK = [
    stage((0, 2), replica([0], 8, 2)),
    stage((2, 4), replica([1], 5, 2), replica([2], 3), zero=1),
]
TWO_CHUNKS = [
    chunked([(0, 1), (2, 3)], replica([0], 8, 2)),
    chunked([(1, 2), (3, 4)], replica([1], 5, 2), replica([2], 3), zero=1),
]


def train_counting(world: Any, case: Case) -> tuple[list[tuple[float, float | None]], Shards, int, int]:
    """Losses and norms, weights, the bytes that microbatches keep behind a step, and the most that they kept."""
    trainer, losses = build_trainer(world, case), []
    run_step = trainer.executor.run_step

    def noted(*given: Any) -> Any:
        losses.append(run_step(*given))
        return losses[-1]

    trainer.executor.run_step = noted
    outcomes = [trainer.run_step(step) for step in range(1, 4)]
    assert not trainer.executor._step.inputs  # tokens too go with their microbatch
    assert [loss.requires_grad for loss in losses] == [False] * 3  # nor does a loss hold its graph
    gc.collect()
    meter = trainer._meter
    return [(out.loss, out.grad_norm) for out in outcomes], shards(trainer), meter.live_bytes, meter.peak_bytes


def results(schedule: str, stages: list[dict[str, Any]] = ONE_CHUNK) -> list[Any]:
    return run_ranks(3, train_counting, Case(name=schedule, schedule=schedule, stages=stages, precision="bf16"))


@pytest.fixture(scope="module")
def plain() -> list[Any]:
    return results("1f1b")


@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble", "layered", "ministages"])
def test_microbatches_in_one_order_give_the_same_bits(schedule: str, plain: list[Any]) -> None:
    """Clipping is on, so the norm's bits count too."""
    for (numbers, held, live, _), (reference, expected, *_) in zip(results(schedule), plain, strict=True):
        assert numbers == reference
        assert live == 0
        assert [mine[:3] for mine in held] == [theirs[:3] for theirs in expected] != []
        assert all((mine[3] == theirs[3]).all() for mine, theirs in zip(held, expected, strict=True))


@pytest.mark.parametrize("schedule", ["interleaved", "ministages"])
def test_nothing_is_kept_behind_a_step_of_chunks(schedule: str) -> None:
    assert [live for _, _, live, _ in results(schedule, TWO_CHUNKS)] == [0, 0, 0]


def test_deferred_weight_gradients_keep_their_products() -> None:
    """The second of two stages defers one microbatch's, the first none; kept are every product's input and output
    gradient."""
    stages = [stage((0, 2), replica([0], 8, 2)), stage((2, 4), replica([1], 8, 2))]
    (one, two), (split_one, split_two) = (
        [result[3] for result in run_ranks(2, train_counting, Case(name=name, schedule=name, stages=stages))]
        for name in ("1f1b", "zero_bubble")
    )
    query, kv = MODEL.heads * MODEL.head_size, MODEL.num_kv_heads * MODEL.head_size
    tokens, width = 2 * SEQ_LEN, 8
    products = tokens * (4 * MODEL.hidden + 2 * query + 2 * kv + 3 * MODEL.ffn) * width  # of a layer
    assert split_two - two == pytest.approx(2 * products, rel=0.1)
    assert split_one - one < products  # between the two halves of a microbatch: less than its layers have given back
