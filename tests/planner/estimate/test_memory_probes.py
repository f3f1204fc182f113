"""Probes of memory, whose pieces several modes share, beside the predictor's memory of whole plans that are checked."""

from itertools import product

import pytest

from hethub.planner.candidate.candidate import Pattern
from hethub.planner.candidate.materialize import chunked
from hethub.planner.estimate.memory_model import MemoryModel
from hethub.planner.estimate.memory_probes import FEW, LOADS, MANY, Load, Mode, Probes
from hethub.predictor import rank_memory
from hethub.spec.layout.bind import bind
from hethub.spec.model import ModelSpec
from hethub.spec.plan import SCHEDULES, Offload, PlanSpec, ReplicaSpec, ScheduleName, StageSpec
from tests.planner.problems import TINY, cluster

SEQ_LEN, TP = 128, 2
TIED = ModelSpec(
    name="m", layers=9, hidden=256, heads=8, kv_heads=2, ffn=704, vocab=1024, max_seq_len=256, tied_head=True
)
OFFLOADS: list[tuple[Offload, ...]] = [(), ("activations",), ("parameters",), ("activations", "parameters")]


def whole(
    model: ModelSpec, vendor: str, schedule: ScheduleName, chunks: int, stages: int, layers: int, load: Load,
    mode: Mode, replicas: int,
) -> list[int]:  # fmt: skip
    """Bytes of the first rank of every stage in a plan of equal replicas."""
    model, on = model.replace(layers=stages * layers), cluster((vendor, stages * replicas * TP, 0.1, 4.0))
    all_held, cuts = SCHEDULES[schedule].holds_all, chunked([layers] * stages, chunks)
    samples = load.micro_batch * (load.held if all_held else 3 * load.held)
    formed = tuple(
        StageSpec(
            layers=cuts[stage],
            replicas=tuple(
                ReplicaSpec(
                    ranks=tuple(range(index * TP, (index + 1) * TP)),
                    micro_batch=load.micro_batch,
                    samples=samples,
                    in_flight=None if all_held else load.held,
                )
                for index in range(stage * replicas, (stage + 1) * replicas)
            ),
            recompute=mode.recompute,
            zero=mode.zero,
            offload=mode.offload,
        )
        for stage in range(stages)
    )
    plan = PlanSpec(
        model=model.name,
        cluster=on.name,
        global_batch=replicas * samples,
        seq_len=SEQ_LEN,
        precision="bf16",
        schedule=schedule,
        stages=formed,
    )
    found = rank_memory(bind(plan, model, on), only=range(0, on.size, replicas * TP))
    return [rank.bytes for rank in found]


@pytest.mark.parametrize("model", [TINY, TIED], ids=["own head", "tied head"])
@pytest.mark.parametrize("vendor", ["cpu", "nvidia"])
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("layered", 1), ("ministages", 2)])
def test_ranks_of_probes_hold_what_the_predictor_says_in_every_mode(model, vendor, schedule, chunks):
    probes = Probes(model, SEQ_LEN, "bf16", vendor == "cpu", TP, Pattern(schedule, chunks))
    modes = product(range(4), OFFLOADS, ("none", "selective", "full"))
    for zero, offload, recompute in modes:
        mode = Mode(recompute, zero, offload, Pattern(schedule, chunks))
        layers = mode.layers
        for load, replicas in [*((load, FEW) for load in LOADS), (LOADS[0], MANY)]:
            args = (model, vendor, schedule, chunks)
            expected = [held for n in (3, 1) for held in whole(*args, n, layers, load, mode, replicas)]
            found = probes.bytes(layers, load, mode, replicas).tolist()
            if chunks > 1 and load.held == 1:  # whose layers leave one by one, with more microbatches chunk by chunk
                assert all(held <= told <= 1.02 * held for told, held in zip(found, expected, strict=True))
            else:
                assert found == expected, (mode, load, replicas)


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_zero_bubble_keeps_what_1f1b_does_and_what_it_puts_off(recompute):
    memory_model, mode = MemoryModel(TINY, SEQ_LEN, "bf16"), Mode(recompute, 1)
    late, usual = (
        whole(TINY, "nvidia", schedule, 1, 3, 2, Load(4, 2), mode, 2) for schedule in ("zero_bubble", "1f1b")
    )
    assert late == usual
    one, four = (
        memory_model.coefficients(False, TP, size, Mode(recompute, 1, (), Pattern("zero_bubble"))) for size in (1, 4)
    )
    assert (four.layer_deferred_wgrad == 4 * one.layer_deferred_wgrad).all()
    assert one.layer_deferred_wgrad.min() > 0
    assert (four.once == memory_model.coefficients(False, TP, 4, Mode(recompute, 1)).once).all()
