"""What a run does against what was predicted of it: actions in order and bytes at the peak, rank by rank."""

from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install hethub[train]")

from hethub.predictor import predict, rank_memory
from hethub.predictor.memory.ranks import COUNTED
from hethub.spec.layout.state import BUCKET_ELEMENTS
from hethub.spec.model import ModelSpec
from tests.support.layouts import Case, build_trainer, replica, stage
from tests.support.ranks import run_ranks

WIDE = ModelSpec(
    name="wide", layers=4, hidden=128, heads=8, kv_heads=4, ffn=320, vocab=256, max_seq_len=64, init_std=0.05
)
TIED = WIDE.replace(tied_head=True)
TWO = (replica([0], 10, 2), replica([1], 6, 3))


def chunks(*layers: tuple[int, int], replicas: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"layers": [list(own) for own in layers], "replicas": replicas, **more}


def of(name: str, *stages: dict[str, Any], **more: Any) -> Case:
    return Case(
        name=name, stages=list(stages), global_batch=16, seq_len=32, model=more.pop("model", WIDE), precision="fp32",
        steps=2, bucket_elements=BUCKET_ELEMENTS, **more,
    )  # fmt: skip


CASES = [
    of("zero 1", stage((0, 4), *TWO, zero=1)),
    of("zero 2", stage((0, 4), *TWO, zero=2)),
    of("zero 3", stage((0, 4), *TWO, zero=3)),
    of("zero 3, uneven state", stage((0, 4), *TWO, zero=3, state_shares={0: 0.2})),
    of("zero 3, tied head", stage((0, 4), *TWO, zero=3), model=TIED),
    of("zero 2 before zero 3", stage((0, 2), *TWO, zero=2), stage((2, 4), replica([2], 8, 2), replica([3], 8, 1), zero=3)),
    of("zero 3, recompute", stage((0, 4), *TWO, zero=3, recompute="full")),
    of("layered", stage((0, 4), *TWO, zero=3, recompute="full"), schedule="layered"),
    of(
        "ministages",
        chunks((0, 1), (2, 3), replicas=[replica([0], 10, 2), replica([1], 6, 3)], zero=2),
        chunks((1, 2), (3, 4), replicas=[replica([2], 16, 4)]),
        schedule="ministages",
    ),
    of(
        "interleaved",
        chunks((0, 1), (2, 3), replicas=[replica([0], 16, 2)]),
        chunks((1, 2), (3, 4), replicas=[replica([1], 16, 2)]),
        schedule="interleaved",
    ),
    of("zero bubble", stage((0, 2), replica([0], 16, 2)), stage((2, 4), replica([1], 16, 2)), schedule="zero_bubble"),
    of("offloaded parameters", stage((0, 4), *TWO, zero=1, offload=["parameters"])),
    of("offloaded parameters, zero 3", stage((0, 4), *TWO, zero=3, offload=["parameters"])),
    of("offloaded optimizer", stage((0, 4), *TWO, zero=2, offload=["optimizer"])),
    of("offloaded activations", stage((0, 2), replica([0], 16, 2), offload=["activations"]), stage((2, 4), replica([1], 16, 2))),
    of("layered, all offloaded", stage((0, 4), *TWO, zero=3, recompute="full", offload=["activations", "optimizer", "parameters"]),
       schedule="layered"),
    of(
        "ministages, offloaded",
        chunks((0, 1), (2, 3), replicas=[replica([0], 10, 2), replica([1], 6, 3)], zero=2, offload=["parameters", "optimizer"]),
        chunks((1, 2), (3, 4), replicas=[replica([2], 16, 4)], offload=["parameters"]),
        schedule="ministages",
    ),
]  # fmt: skip


def watch(world: Any, case: Case) -> tuple[int, int, list[str]]:
    """Peak bytes of a rank that trains the case and of its host memory, and the names of the actions of its last
    step."""
    trainer = build_trainer(world, case)
    for step in range(1, case.steps + 1):
        trainer.run_step(step)
    return trainer.memory_bytes, trainer.arena.peak_bytes, [span.name for span in trainer.spans]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_run_does_and_holds_what_was_predicted(case: Case) -> None:
    layout = case.layout()
    measured = run_ranks(case.size, watch, case, islands=case.islands)
    spans, foreseen = predict(layout, with_timeline=True).timeline or (), rank_memory(layout)
    for rank, (peak_bytes, host_bytes, names) in enumerate(measured):
        assert names == [span.name for span in spans if span.rank == rank]
        counted = sum(foreseen[rank].parts[part] for part in COUNTED)
        assert counted == pytest.approx(peak_bytes, rel=0.05), foreseen[rank].parts
        offloaded = foreseen[rank].host_bytes - foreseen[rank].host_parts["checkpoint"]
        assert offloaded == pytest.approx(host_bytes, rel=0.05)
