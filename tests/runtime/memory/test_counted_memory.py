"""What a rank counts when it trains is what the predictor foresaw, wherever its state lies: device and host bytes."""

from dataclasses import replace
from typing import Any

import pytest

from hethub.predictor.cost.software import HETHUB
from hethub.predictor.memory.parameters import rank_widths, replica_widths
from hethub.predictor.memory.ranks import COUNTED, rank_memory
from hethub.predictor.memory.shards import Shard
from hethub.predictor.memory.state import resident
from hethub.predictor.memory.surroundings import surroundings
from hethub.spec.layout.state import BUCKET_ELEMENTS
from hethub.spec.model import ModelSpec
from tests.support.layouts import Case, build_trainer, chunked, replica, stage
from tests.support.ranks import run_ranks

MODEL = ModelSpec(name="small", layers=6, hidden=64, heads=8, kv_heads=4, ffn=176, vocab=256, max_seq_len=64)
SHORT, LONG = 8, 32  # tokens of a sample
ALL = ["parameters", "optimizer", "activations"]


def pair(zero: int, **more: Any) -> list[dict[str, Any]]:
    return [stage((0, 6), replica([0], 4, 2), replica([1], 4, 2), zero=zero, **more)]


def unlike(zero: int, **more: Any) -> list[dict[str, Any]]:
    """The first rank joins the parts that the two others hold of every tensor."""
    return [stage((0, 6), replica([0], 4, 2), replica([1, 2], 4, 2), zero=zero, **more)]


def wide(
    name: str,
    zero: int,
    others: list[int],
    schedule: str = "1f1b",
    precision: str = "fp32",
    *,
    micro: int = 1,
    **more: Any,
) -> Case:
    """Two replicas whose weights and gradients make the peak, not what their samples keep."""
    model = MODEL.replace(**{"hidden": 256, "ffn": 704, "vocab": 4096, **more})
    layers = [(0, 3), (3, 6)] if schedule == "ministages" else [(0, 6)]
    return Case(
        name=f"wide, zero{zero}, {name}",
        stages=[chunked(layers, replica([0], 2, micro), replica(others, 2, micro), zero=zero)],
        global_batch=4,
        schedule=schedule,
        precision=precision,
        model=model,
        seq_len=SHORT,
    )


def chunks(**more: Any) -> list[dict[str, Any]]:
    return [
        chunked([(0, 1), (2, 3), (4, 5)], replica([0], 8, 2), **more),
        chunked([(1, 2), (3, 4), (5, 6)], replica([1], 8, 2), **more),
    ]


NO_CLIP = {"grad_clip": None}
CASES = [
    Case(name="zero1, state shares", stages=pair(1, state_shares={0: 0.9})),
    Case(name="zero2", stages=pair(2)),
    Case(name="zero2, bf16", stages=pair(2), precision="bf16"),
    Case(name="zero3, state shares", stages=pair(3, state_shares={1: 0.1})),
    Case(name="zero3, full recompute", stages=pair(3, recompute="full")),
    Case(name="zero3, tied head", stages=pair(3), model=MODEL.replace(tied_head=True)),
    Case(name="zero3, layered", stages=pair(3), schedule="layered"),
    Case(
        name="zero3, layered, full recompute",
        stages=[stage((0, 6), replica([0], 24, 24), replica([1], 24, 24), zero=3, recompute="full")],
        schedule="layered",
        model=MODEL.replace(hidden=256, ffn=704),  # whose weights make a lower layer's backward the peak
        global_batch=48,
    ),
    Case(
        name="zero3, layered, full recompute, activations offloaded",
        stages=[stage((0, 6), replica([0], 24, 24), replica([1], 24, 24), zero=3, recompute="full", offload=ALL[2:])],
        schedule="layered",
        model=MODEL.replace(hidden=256, ffn=704),
        global_batch=48,
    ),
    Case(name="zero3, layered, all offloaded", stages=pair(3, offload=ALL), schedule="layered"),
    Case(name="zero0, all offloaded", stages=pair(0, offload=ALL)),
    Case(name="zero2, all offloaded, bf16", stages=pair(2, offload=ALL), precision="bf16"),
    Case(name="zero2, tp 1 beside tp 2", stages=unlike(2)),
    Case(name="zero3, tp 1 beside tp 2", stages=unlike(3)),
    Case(name="zero3, tp 1 beside tp 2, tied head", stages=unlike(3), model=MODEL.replace(tied_head=True)),
    Case(name="zero3, tp 1 beside tp 2, layered", stages=unlike(3), schedule="layered"),
    Case(
        name="zero3, tp 1 beside tp 2, ministages",
        stages=[chunked([(0, 3), (3, 6)], replica([0], 4, 2), replica([1, 2], 4, 2), zero=3)],
        schedule="ministages",
    ),
    wide("ministages", 2, [1], "ministages"),
    wide("layered, tied head", 3, [1], "layered", tied_head=True),
    wide("tp 1 beside tp 2, ministages", 3, [1, 2], "ministages"),
    wide("tp 1 beside tp 2, one microbatch", 3, [1, 2], micro=2),
    wide("tp 1 beside tp 2, ministages, tied head", 3, [1, 2], "ministages", tied_head=True),
    wide("ministages, one microbatch", 2, [1], "ministages", micro=2),
    wide("ministages, one microbatch, tied head", 3, [1], "ministages", micro=2, tied_head=True),
    wide("tp 1 beside tp 2, ministages, one microbatch", 3, [1, 2], "ministages", micro=2),
    wide("tp 1 beside tp 2, ministages, bf16, many words", 2, [1, 2], "ministages", "bf16", vocab=16384),
    wide("tp 1 beside tp 2, many words, tied head", 3, [1, 2], vocab=16384, tied_head=True),
    Case(
        name="zero_bubble",
        stages=[stage((0, 3), replica([0], 8, 1)), stage((3, 6), replica([1], 8, 1))],
        schedule="zero_bubble",
    ),
    Case(name="ministages", stages=chunks(), schedule="ministages"),
    Case(name="ministages, all offloaded", stages=chunks(offload=ALL), schedule="ministages"),
    Case(
        name="ministages, zero2, parameters and optimizer offloaded, no clipping",
        stages=[chunked([(0, 3), (3, 6)], replica([0], 4, 2), replica([1], 4, 1), zero=2, offload=ALL[:2])],
        schedule="ministages",
        train=NO_CLIP,
    ),
]


def counted_bytes(world: Any, case: Case) -> tuple[int, int]:
    """This rank's peak on the device and in host memory."""
    trainer = build_trainer(world, case)
    for step in (1, 2):
        trainer.run_step(step)
    return trainer.memory_bytes, trainer.arena.peak_bytes


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_counted_memory_is_the_plans(case: Case) -> None:
    precision = "fp32" if case.precision == "fp64" else case.precision
    model = MODEL if case.model.name == "tiny" else case.model
    seq_len = SHORT if case.seq_len == SHORT else LONG
    case = Case(
        **{**vars(case), "precision": precision, "model": model, "seq_len": seq_len, "bucket_elements": BUCKET_ELEMENTS}
    )
    foreseen, close = rank_memory(case.layout()), 0.005 if seq_len == SHORT else 0.02
    counted = run_ranks(case.size, counted_bytes, case)
    for rank, (entry, (device, host)) in enumerate(zip(foreseen, counted, strict=True)):
        assert sum(entry.parts[part] for part in COUNTED) == pytest.approx(device, rel=close), (
            f"rank {rank}: {entry.parts}"
        )
        offloaded = entry.host_bytes - entry.host_parts["checkpoint"]  # of which none is written here
        assert offloaded == pytest.approx(host, rel=0.05), f"rank {rank}"


MIXED = Case(
    name="tp 2 beside tp 1",
    stages=[stage((0, 6), replica([0, 1], 4, 2), replica([2], 4, 2), zero=1)],
    model=MODEL,
    precision="fp32",
    bucket_elements=BUCKET_ELEMENTS,
)
HELD_TWICE = replace(
    MIXED,
    name="tp 2 with one key-value head",
    stages=[stage((0, 6), replica([0, 1], 4, 2), replica([2, 3], 4, 2), zero=1)],
    model=MODEL.replace(kv_heads=1),
)


def joined_gradients(world: Any, case: Case) -> int:
    """Bytes that this rank copies of its gradients to reduce them."""
    trainer, found = build_trainer(world, case), []
    finish, own = trainer.reducer.finish, trainer.storage.grads.untyped_storage().data_ptr()

    def look(chunk: int | None = None) -> None:
        trainer.reducer._launch_full()
        flats = [flat for _, _, flat in trainer.reducer._works if flat.untyped_storage().data_ptr() != own]
        found.append(sum(flat.nbytes for flat in flats))
        finish(chunk)

    trainer.reducer.finish = look  # type: ignore[method-assign]
    trainer.run_step(1)
    return found[0]


@pytest.mark.parametrize("case", [MIXED, HELD_TWICE], ids=lambda case: case.name)
def test_gradients_that_lie_apart_are_joined_in_copies(case: Case) -> None:
    layout, foreseen = case.layout(), []
    for spec in layout.stages[0].replicas:
        for rank, cut in zip(spec.ranks, replica_widths(case.model, spec, HETHUB), strict=True):
            found = resident(Shard(layout, 0, cut, HETHUB, 4), layout.assignment_of[rank], on_cpu=True)
            foreseen.append(found.joined_bytes)
    assert run_ranks(case.size, joined_gradients, case) == pytest.approx(foreseen, rel=0.01)
    assert foreseen[-1] > 0
    assert (foreseen[0] == 0) is (case is MIXED)


def activations_beside_copies(world: Any, case: Case) -> int:
    """What is kept at the peak of two steps where copies to the host go on beside the next layer, as a device's do."""
    trainer = build_trainer(world, case)
    trainer.arena.leave = lambda copies: trainer.arena._leaving.extend(copies)
    for step in (1, 2):
        trainer.run_step(step)
    peak: int = trainer._meter.peak_bytes
    return peak


OFFLOADED = [
    Case(name="one stage", stages=[stage((0, 6), replica([0], 8, 2), offload=ALL[2:])]),
    Case(
        name="two stages",
        stages=[
            stage((0, 3), replica([0], 8, 2), offload=ALL[2:]),
            stage((3, 6), replica([1], 8, 2), offload=ALL[2:], recompute="full"),
        ],
    ),
]


@pytest.mark.parametrize("case", OFFLOADED, ids=lambda case: case.name)
def test_a_third_layer_s_activations_are_on_their_way_to_the_host_on_a_device(case: Case) -> None:
    """Two were predicted, there as on a CPU, where a copy is done when it begins."""
    case = replace(case, precision="fp32", model=MODEL, seq_len=32)
    layout = case.layout()
    (cut,) = rank_widths(MODEL, 1)
    counted = run_ranks(case.size, activations_beside_copies, case)
    for rank, (entry, peak) in enumerate(zip(rank_memory(layout), counted, strict=True)):
        place = layout.assignments[rank]
        around = [
            surroundings(Shard(layout, place.stage, cut, HETHUB, 4), place, on_cpu=on_cpu) for on_cpu in (True, False)
        ]
        foreseen = entry.parts["activations"] + around[1]["buffers"] - around[0]["buffers"]
        assert peak == pytest.approx(foreseen, rel=0.08), f"rank {rank}"
