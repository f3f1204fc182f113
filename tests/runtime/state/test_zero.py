"""Gradients and weights that only their owners keep (ZeRO 2 and 3), with state shares, train the model of one
process."""

from dataclasses import replace
from typing import Any

import pytest

from hethub.runtime.state.verify import verify_copies
from hethub.spec.errors import BadInput
from hethub.spec.layout.execution import actor_order, check_executable
from hethub.spec.layout.state import BUCKET_ELEMENTS
from hethub.spec.ranges import Range, merge
from tests.support.layouts import (
    MODEL,
    Case,
    Shards,
    build_trainer,
    chunked,
    replica,
    shards,
    stage,
    worst_difference,
)  # fmt: skip
from tests.support.ranks import run_ranks

TOLERANCE = 1e-10
TIED = MODEL.replace(tied_head=True)
MQA = MODEL.replace(kv_heads=2)
SIX = MODEL.replace(layers=6)
NO_CLIP = {"grad_clip": None}


def alike(num_ranks: int, zero: int, **more: Any) -> list[dict[str, Any]]:
    """One stage of one-rank replicas that share eight samples evenly."""
    return [stage((0, 4), *(replica([rank], 8 // num_ranks, 2) for rank in range(num_ranks)), zero=zero, **more)]


def zero2_before_zero3(*loads: tuple[int, int]) -> list[dict[str, Any]]:
    """Two stages of two one-rank replicas each; `loads` are samples and micro-batch by rank."""
    own = [replica([rank], *load) for rank, load in enumerate(loads)]
    return [stage((0, 2), *own[:2], zero=2), stage((2, 4), *own[2:], zero=3)]


CASES = [
    Case(name="zero2", stages=alike(2, 2)),
    Case(name="zero3", stages=alike(2, 3)),
    Case(name="zero3, four ranks, 90 % on one", stages=alike(4, 3, state_shares={1: 0.9})),
    Case(
        name="zero2, four ranks, nothing on one and 10 % on another", stages=alike(4, 2, state_shares={0: 0.0, 3: 0.1})
    ),
    Case(name="zero3, tied head, nothing on one", stages=alike(2, 3, state_shares={0: 0.0}), model=TIED),
    Case(name="zero2, tied head, 10 % on one", stages=alike(2, 2, state_shares={0: 0.1}), model=TIED),
    Case(name="zero3, gpipe", stages=alike(2, 3), schedule="gpipe"),
    Case(name="zero3, gpipe, tied head", stages=alike(2, 3), schedule="gpipe", model=TIED),
    Case(
        name="zero3 over two islands, tp2 beside tp1",
        stages=[stage((0, 4), replica([0, 1], 4, 2), replica([2], 4, 2), zero=3, state_shares={2: 0.3})],
        vendors="nna",
    ),
    Case(
        name="zero2, shared kv heads, tp4 beside tp1",
        stages=[stage((0, 4), replica([0, 1, 2, 3], 4, 2), replica([4], 4, 2), zero=2)],
        model=MQA,
    ),
    Case(
        name="zero3, then zero2, over two islands",
        stages=[
            stage((0, 2), replica([0], 4, 2), replica([1], 4, 2), zero=3, state_shares={0: 0.9}),
            stage((2, 4), replica([2], 4, 2), replica([3], 4, 2), zero=2, recompute="full"),
        ],
        vendors="anan",
    ),
    Case(
        name="zero2 and zero3, tied head over the stages",
        stages=[
            stage((0, 1), replica([0], 4, 2), replica([1], 4, 2), zero=2),
            stage((1, 4), replica([2, 3], 4, 2), replica([4], 4, 2), zero=3),
        ],
        model=TIED,
        vendors="aannn",
    ),
    Case(
        name="zero3 in one replica has nothing to shard",
        stages=[stage((0, 2), replica([0, 1], 8, 2), zero=3), stage((2, 4), replica([2], 8, 2), zero=2)],
    ),
    Case(
        name="zero3 in rounds, uneven samples",
        stages=[stage((0, 4), replica([0], 5, 1), replica([1], 3, 2), zero=3, state_shares={1: 0.1})],
    ),
    Case(
        name="zero2 in rounds between pipelines, other microbatches and islands",
        stages=[
            stage((0, 1), replica([0], 8, 3)),
            stage((1, 3), replica([1], 6, 2), replica([2], 2, 2), zero=2),
            stage((3, 4), replica([3], 5, 2), replica([4], 3, 1), zero=3),
        ],
        vendors="nanna",
        model=TIED,
    ),
    Case(
        name="layered, zero3, other counts per rank",
        stages=[stage((0, 4), replica([0], 5, 1), replica([1], 3, 2), zero=3, state_shares={0: 0.9})],
        schedule="layered",
        vendors="an",
    ),
    Case(
        name="layered, zero2, two stages, tied head, no clipping",
        stages=zero2_before_zero3((5, 1), (3, 3), (6, 2), (2, 2)),
        schedule="layered",
        model=TIED,
        train=NO_CLIP,
    ),
    Case(
        name="ministages, zero3, one microbatch beside three, tied head",
        stages=[chunked([(0, 2), (2, 4)], replica([0], 6, 2), replica([1], 2, 2), zero=3)],
        schedule="ministages",
        model=TIED,
    ),
    Case(
        name="ministages, zero2, two stages of three chunks",
        stages=[
            chunked([(0, 1), (2, 3), (4, 5)], replica([0], 5, 2), replica([1], 3, 1), zero=2),
            chunked([(1, 2), (3, 4), (5, 6)], replica([2], 8, 2), zero=2),
        ],
        schedule="ministages",
        model=SIX,
        vendors="ann",
    ),
    Case(
        name="ministages, zero2, all offloaded",
        stages=[
            chunked(
                [(0, 1), (2, 3), (4, 5)],
                replica([0], 5, 2),
                replica([1], 3, 1),
                zero=2,
                offload=["parameters", "optimizer"],
            ),
            chunked([(1, 2), (3, 4), (5, 6)], replica([2], 8, 2), zero=1, offload=["parameters", "optimizer"]),
        ],
        schedule="ministages",
        model=SIX,
    ),
    Case(
        name="ministages, zero2, all offloaded, no clipping, tied head",
        stages=[
            chunked(
                [(0, 1), (2, 3)], replica([0], 5, 2), replica([1], 3, 1), zero=2, offload=["parameters", "optimizer"]
            ),
            chunked([(1, 2), (3, 4)], replica([2], 8, 2), zero=2, offload=["parameters"]),
        ],
        schedule="ministages",
        model=TIED,
        train=NO_CLIP,
    ),
    Case(
        name="ministages of one stage, zero3, all offloaded, no clipping",
        stages=[
            chunked(
                [(0, 2), (2, 4)], replica([0], 6, 2), replica([1], 2, 2), zero=3, offload=["parameters", "optimizer"]
            )
        ],
        schedule="ministages",
        model=TIED,
        train=NO_CLIP,
    ),
    Case(
        name="interleaved, zero3",
        stages=[
            chunked([(0, 1), (2, 3)], replica([0], 4, 2), replica([1], 4, 2), zero=3),
            chunked([(1, 2), (3, 4)], replica([2], 8, 2)),
        ],
        schedule="interleaved",
    ),
    Case(
        name="zero_bubble, zero2 and zero3",
        stages=zero2_before_zero3((5, 2), (3, 1), (4, 2), (4, 1)),
        schedule="zero_bubble",
    ),
]


def train_counting(world: Any, case: Case) -> tuple[list[float], list[float], Shards, dict[str, Any]]:
    """Losses, norms, weights, and what was counted in the last step."""
    trainer = build_trainer(world, case)
    losses, norms = [], []
    for step in range(1, case.steps + 1):
        gathers = trainer.zero_manager.weights and trainer.zero_manager.weights.gathers
        if gathers:
            gathers.clear()
        outcome = trainer.run_step(step)
        losses.append(outcome.loss)
        norms.append(outcome.grad_norm or float("nan"))
    trainer.stepping.flush()
    verify_copies(world, trainer.reducer, case.steps)
    weights, gradients = trainer.zero_manager.weights, trainer.zero_manager.gradients
    counted: dict[str, Any] = {
        "gathers": dict(weights.gathers) if weights else {},
        "most_present": weights.most_present if weights else 0,
        "most_chunks": weights.most_chunks if weights else 0,
        "reductions": dict(gradients.reductions) if gradients else {},
        "weights": sum(values.numel() for _, _, values in trainer.storage.persistent()),
        "gradients": trainer.storage.grads.numel() + sum(own.numel() for own in trainer.storage.owned_grads.values()),
        "optimizer_bytes": trainer.optimizer.state_bytes,
    }
    return losses, norms, shards(trainer), counted


_REFERENCES: dict[str, tuple[list[float], list[float], Shards]] = {}


def _reference(case: Case) -> tuple[list[float], list[float], Shards]:
    """What one process trains, once for all cases of the same training."""
    if (key := repr(case.alone())) not in _REFERENCES:
        _REFERENCES[key] = run_ranks(1, train_counting, case.alone())[0][:3]
    return _REFERENCES[key]


def check_against_one_process(case: Case, **connect: Any) -> list[dict[str, Any]]:
    """Trains the case as one process does, the ranks together keeping all of it; returns what each counted."""
    losses, norms, weights = _reference(case)
    results = run_ranks(case.size, train_counting, case, islands=case.islands, timeout_seconds=120, **connect)
    for rank_losses, rank_norms, _, _ in results:
        assert rank_losses == pytest.approx(losses, rel=TOLERANCE)
        assert rank_norms == pytest.approx(norms, rel=TOLERANCE)
    held = [held for _, _, held, _ in results]
    assert worst_difference(held, weights) <= TOLERANCE
    for name, start, stop, _ in weights:
        kept = merge(Range(a, b) for own in held for other, a, b, _ in own if other == name)
        assert kept == [Range(start, stop)]
    return [counts for *_, counts in results]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_layout_equals_one_process(case: Case) -> None:
    """Three steps: the third begins with weights, moments and norms of a step that itself began with another's."""
    check_against_one_process(replace(case, steps=3))


WIDE = MODEL.replace(name="wide", hidden=512, ffn=4096)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_layers_wider_than_the_products_buckets_equal_one_process(zero: int) -> None:
    check_against_one_process(Case(name="wide", stages=alike(2, zero), model=WIDE, bucket_elements=BUCKET_ELEMENTS))


OVER_ISLANDS = [case for case in CASES if case.vendors]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[pytest.mark.slow] if index > 1 else [])
        for index, case in enumerate(OVER_ISLANDS)
    ],
)
def test_the_way_of_devices_equals_one_process(case: Case) -> None:
    """Host tensors staged as a device's: shares are reduced and gathered by the islands' native legs."""
    check_against_one_process(replace(case, steps=2), staged_ranks=range(case.size))


NORMS = MODEL.hidden * (2 * MODEL.layers + 1)
STATE = 16  # bytes of moments per parameter in float64


def counted(stages: list[dict[str, Any]], **more: Any) -> list[dict[str, Any]]:
    """What every rank of a plan counted in its second step."""
    case = Case(name="counted", stages=stages, steps=2, **more)
    return [counts for *_, counts in run_ranks(case.size, train_counting, case)]


@pytest.mark.parametrize("shares", [{}, {0: 0.0}, {0: 0.1}, {0: 0.9}], ids=["even", "0 %", "10 %", "90 %"])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_bytes_of_state_are_the_shares(zero: int, shares: dict[int, float]) -> None:
    """Of two ranks: optimizer state at every level, gradients from ZeRO 2 on, weights under 3; norms are held by
    both."""
    case = Case(name="shares", stages=alike(2, zero, state_shares=shares), steps=2)
    for rank, counts in enumerate(check_against_one_process(case)):
        share = shares.get(0, 0.5) if rank == 0 else 1 - shares.get(0, 0.5)
        owned = counts["optimizer_bytes"] / STATE
        assert owned == pytest.approx(share * MODEL.parameters, abs=len(shares) + 8)
        for kind, sharded_from in (("gradients", 2), ("weights", 3)):
            if zero >= sharded_from:
                assert owned <= counts[kind] <= owned + NORMS
            else:
                assert counts[kind] == MODEL.parameters
        assert zero < 3 or counts["weights"] == counts["gradients"]


def test_zero2_keeps_all_weights_and_its_own_gradients() -> None:
    for counts in counted(alike(2, 2)):
        assert counts["weights"] == MODEL.parameters
        assert counts["gradients"] <= MODEL.parameters / 2 + NORMS
        assert counts["gathers"] == {}
        assert counts["reductions"] == dict.fromkeys(range(4), 2)  # units times microbatches


def test_layered_gathers_a_layer_once_per_pass_and_reduces_it_once() -> None:
    """Where forward ends backward begins, so the last layer stays between them."""
    stages = [stage((0, 4), replica([0], 5, 1), replica([1], 3, 2), zero=3)]
    for counts in counted(stages, schedule="layered"):
        assert counts["gathers"] == {0: 2, 1: 2, 2: 2, 3: 1}
        assert counts["reductions"] == dict.fromkeys(range(4), 1)
        assert counts["most_present"] == 2


def test_rounds_gather_a_layer_once_per_microbatch_and_pass_on_ranks_without_a_microbatch_too() -> None:
    for counts in counted([stage((0, 4), replica([0], 6, 2), replica([1], 2, 2), zero=3)]):
        assert counts["gathers"] == {0: 4, 1: 6, 2: 6, 3: 3}  # the ends stay where the next visit is theirs
        assert counts["reductions"] == dict.fromkeys(range(4), 3)
        assert counts["most_present"] == 2


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble", "layered"])
def test_where_passes_turn_no_weights_are_gathered(schedule: str) -> None:
    """What the predictor prices: each layer in each pass, but for the one at which a pass turns back."""
    stages = [
        stage((0, 2), replica([0], 8, 2), replica([1], 8, 2), zero=3),
        stage((2, 4), replica([2], 8, 2), replica([3], 8, 2), zero=3),
    ]
    more: dict[str, Any] = {"schedule": schedule, "global_batch": 16}
    layout = Case(name="turns", stages=stages, **more).layout()
    passes = 2 if schedule == "layered" else 2 * 4
    for rank, counts in enumerate(counted(stages, **more)):
        turning, returning = actor_order(layout, rank // 2, 0).turns
        assert counts["gathers"] == {0: passes - returning, 1: passes - turning}


@pytest.mark.parametrize("layers", [2, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble", "layered", "ministages"])
def test_a_tied_embedding_comes_again_where_a_pass_ends(schedule: str, layers: int) -> None:
    """What the predictor prices, of one stage: before the step's first layer and in each pass with the layer where that
    ends, if there are layers between the two. Weight gradients that are put off send it away before the next forward."""
    cuts = [(at, at + 1) for at in range(layers)] if schedule == "ministages" else [(0, layers)]
    stages = [chunked(cuts, replica([0], 8, 2), replica([1], 8, 2), zero=3)]
    model = MODEL.replace(layers=layers, tied_head=True)
    rounds = 1 if schedule in ("layered", "ministages") else 4
    again = rounds if schedule == "zero_bubble" else 1
    for counts in counted(stages, schedule=schedule, model=model, global_batch=16):
        assert counts["gathers"][layers] == again + 2 * rounds * (layers > 2)


@pytest.mark.parametrize("train", [{}, NO_CLIP])
def test_ministages_keep_two_chunks_on_the_device_at_most(train: dict[str, Any]) -> None:
    stages = [chunked([(start, start + 1) for start in range(6)], replica([0], 8, 2), offload=["parameters"])]
    (counts,) = counted(stages, schedule="ministages", model=SIX, train=train)
    assert counts["most_chunks"] == 2  # the one at work and the one on its way
    assert counts["most_present"] == 2
    assert counts["gathers"] == {0: 2, 1: 2, 2: 2, 3: 2, 4: 2, 5: 1}


def test_one_microbatch_leaves_each_layer_of_a_chunk_behind_it() -> None:
    """All layers of the chunk stayed until the last was entered, and their sums began as late: a rehearsed step was a fifth
    longer."""
    stages = [chunked([(0, 3), (3, 6)], replica([0], 4, 4), replica([1], 4, 4), zero=3)]
    for counts in check_against_one_process(
        Case(name="one microbatch", stages=stages, schedule="ministages", model=SIX)
    ):
        assert counts["most_present"] == 2
        assert counts["reductions"] == dict.fromkeys(range(6), 1)


def test_shares_that_cannot_be_met_are_refused_before_anything_runs() -> None:
    tied = [stage((0, 4), replica([0, 1], 4), replica([2], 4), zero=3, state_shares={0: 0.8})]
    with pytest.raises(BadInput, match=r"rank 0 is given 0.8 of the stage's state.* it can own at most 0\.\d+"):
        check_executable(Case(name="too much", stages=tied).layout())
