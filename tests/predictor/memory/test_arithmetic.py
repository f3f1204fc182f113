"""Bytes of ranks against sums written out here: what no count of a run reaches."""

from typing import Any

import pytest

from hethub.predictor import rank_memory
from hethub.predictor.cost.software import HETHUB, Software
from hethub.predictor.memory.parameters import replica_widths
from hethub.predictor.memory.shards import Shard
from hethub.predictor.memory.state import Resident, resident
from hethub.spec.layout.bind import Layout, bind
from hethub.spec.model import ModelSpec
from hethub.spec.plan import PlanSpec
from tests.predictor.plans import cluster, uniform

MODEL = ModelSpec(name="grouped", layers=6, hidden=128, heads=8, kv_heads=4, ffn=344, vocab=512, max_seq_len=64)
# Of a layer: queries and output, keys and values, gate, up and down.
MATRICES = 128 * (2 * 128 + 2 * 64) + 3 * 128 * 344
NORMS = 2 * 128
TABLE = 512 * 128


def parameters(tied: bool) -> int:
    return 6 * (MATRICES + NORMS) + 128 + TABLE * (1 if tied else 2)


def even(model: ModelSpec = MODEL, device: str = "CPU-core", pp: int = 2, dp: int = 3, **more: Any) -> Layout:
    tp = more.pop("tp", 1)
    on = cluster((device, 1, pp * dp * tp))
    return uniform(
        model, on, tp=tp, pp=pp, micro_batch=1, batch=dp, seq=32, precision=more.pop("precision", "fp32"), **more
    )


def cut(cuts: list[list[float]], zero: int) -> Layout:
    """One stage whose replicas' ranks have these tensor shares."""
    replicas, size = [], 0
    for shares in cuts:
        ranks = list(range(size, size := size + len(shares)))
        replicas.append({"ranks": ranks, "micro_batch": 1, "samples": 1, "tensor_shares": shares})
    on = cluster(("CPU-core", 1, size))
    plan = {
        "model": MODEL.name, "cluster": on.name, "global_batch": len(cuts), "seq_len": 16, "precision": "fp32",
        "stages": [{"layers": [[0, MODEL.layers]], "replicas": replicas, "zero": zero}],
    }  # fmt: skip
    return bind(PlanSpec.model_validate(plan), MODEL, on)


def residents(layout: Layout, software: Software = HETHUB, width: int = 4) -> list[Resident]:
    found = []
    for own in layout.assignments:
        widths = replica_widths(layout.model, layout.replica(own.stage, own.replica), software)
        shard = Shard(layout, own.stage, widths[own.position % len(widths)], software, width)
        found.append(resident(shard, own, on_cpu=True))
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_checkpoint_has_every_parameter_once(zero: int, tied: bool, precision: str) -> None:
    """Weight and both moments in fp32. Of a tied head's embedding a third was counted under ZeRO-0 with three replicas:
    it is cut over both ends, and was divided by the replicas once more."""
    layout = even(MODEL.replace(tied_head=tied), zero=zero, precision=precision)
    found = sum(entry.host_parts["checkpoint"] for entry in rank_memory(layout))
    assert found == pytest.approx(12 * parameters(tied), rel=1e-5)


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("cuts", [[[1, 1], [1, 1, 2]], [[1, 1, 2], [1, 1]], [[1, 2, 1], [1, 2, 1], [3, 1]]], ids=str)
def test_ranks_of_one_width_in_other_places_are_counted_apart(cuts: list[list[float]], zero: int) -> None:
    """A half of the heads is had by ranks of both replicas; those of the coarser cut alone join gradients in copies, and
    none were counted where the finer was named first. Optimizer states were up to twice what a rank steps."""
    layout = cut(cuts, zero)
    found = rank_memory(layout)
    assert found == [entry for rank in range(layout.cluster.size) for entry in rank_memory(layout, only=[rank])]
    if zero:  # every parameter is stepped by one rank: two moments in fp32
        assert sum(entry.parts["optimizer"] for entry in found) == pytest.approx(8 * parameters(tied=False), rel=1e-5)


def test_ranks_of_uneven_cuts_keep_every_matrix_once_under_zero_3() -> None:
    kept = sum(own.weights for own in residents(cut([[3, 1], [1, 3]], 3)))
    norms = 6 * NORMS + 128  # on every rank
    assert kept == pytest.approx(parameters(tied=False) - norms + 4 * norms, rel=1e-9)


@pytest.mark.parametrize("zero", [0, 3])
def test_pinned_weights_grow_to_powers_of_two_unit_by_unit(zero: int) -> None:
    """As torch's allocator of pinned memory rounds each buffer: of a layer of 0.71 MB that is 1 MiB, and of the third of
    it that a rank keeps 256 KiB, which was taken to grow as a whole layer does."""
    layout = even(device="A100-SXM4-80GB", pp=3, zero=zero, offload=["parameters"])
    buffer = 4 * MATRICES / (3 if zero else 1)
    rounded = {0: 2**20, 3: 2**18}[zero]
    assert rounded / 2 < buffer < rounded
    (middle,) = rank_memory(layout, only=[4])
    assert middle.host_parts["weights"] == pytest.approx(2 * rounded, rel=1e-4)


@pytest.mark.parametrize("gated", [False, True])
def test_ranks_of_a_gpt_share_its_matrices_and_have_the_rest_whole(gated: bool) -> None:
    """Norms with biases, the matrices' own biases and learned positions stay whole on both ranks."""
    model = MODEL.replace(family="gpt", gated=gated, ffn=384)
    matrices = 6 * (128 * (2 * 128 + 2 * 64) + (3 if gated else 2) * 128 * 384) + 2 * TABLE
    (one, _) = residents(even(model, pp=1, dp=1, tp=2))
    assert one.weights == model.parameters - matrices / 2


def test_ranks_that_share_a_sequence_hold_all_and_step_a_part() -> None:
    """Two replicas of two context-parallel ranks each: ZeRO-1 cuts the state over all four."""
    for own in residents(even(pp=1, dp=2, tp=2, zero=1), Software(stack="other", context_parallel=2)):
        assert (own.weights, own.owned) == (parameters(tied=False), parameters(tied=False) / 4)


@pytest.mark.parametrize(("zero", "parts"), [(0, 1), (1, 6)])
def test_other_frameworks_step_both_copies_of_a_tied_head(zero: int, parts: int) -> None:
    """The last stage's, in full or over its three replicas of two context-parallel ranks; ours over the ranks of both
    ends."""
    layout = even(MODEL.replace(tied_head=True), tp=2, zero=zero)
    other = residents(layout, Software(stack="other", context_parallel=2, one_tied_copy=False))[-1]
    own = 3 * (MATRICES + NORMS) + 128
    assert other.owned == pytest.approx((own + TABLE) / parts)
