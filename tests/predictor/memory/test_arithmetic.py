"""Bytes of ranks against sums written out here: what no count of a run reaches."""

from typing import Any

import pytest

from hethub.predictor import rank_memory
from hethub.predictor.cost.software import HETHUB, Software
from hethub.predictor.memory.activations import HeldActivations, kept_per_sample
from hethub.predictor.memory.parameters import RankParameters, rank_widths, replica_widths
from hethub.predictor.memory.peak import Moment, _chunk_by_chunk
from hethub.predictor.memory.shards import Descent, Shard
from hethub.predictor.memory.state import Resident, resident
from hethub.predictor.memory.surroundings import surroundings
from hethub.spec.layout.bind import Layout, bind
from hethub.spec.model import ModelSpec
from hethub.spec.plan import PlanSpec
from tests.predictor.plans import cluster, under, uniform

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
    more = {"seq": 32, "precision": "fp32", "batch": dp, **more}
    return uniform(model, on, tp=tp, pp=pp, micro_batch=1, **more)


def cut(cuts: list[list[float]], zero: int, **more: Any) -> Layout:
    """One stage whose replicas' ranks have these tensor shares."""
    replicas, size = [], 0
    for shares in cuts:
        ranks = list(range(size, size := size + len(shares)))
        replicas.append({"ranks": ranks, "micro_batch": 1, "samples": 1, "tensor_shares": shares})
    on = cluster(("CPU-core", 1, size))
    plan = {
        "model": MODEL.name, "cluster": on.name, "global_batch": len(cuts), "seq_len": 16, "precision": "fp32",
        "stages": [{"layers": [[0, MODEL.layers]], "replicas": replicas, "zero": zero, **more}],
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
    tied = even(MODEL.replace(tied_head=True), "A100-SXM4-80GB", pp=1, zero=zero, offload=["parameters"])
    grown = rounded / buffer  # as the layers' buffers do, the embedding's too
    assert rank_memory(tied)[0].host_parts["weights"] == pytest.approx(
        4 * (6 * MATRICES + TABLE) / (3 if zero else 1) * grown, rel=1e-4
    )


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


@pytest.mark.parametrize("zero", [2, 3])
def test_norms_and_a_head_tied_to_another_stage_stay(zero: int) -> None:
    last = residents(even(MODEL.replace(tied_head=True), zero=zero))[-1]
    stay, units = 3 * NORMS + 128 + TABLE, 3 * MATRICES
    assert last.gradients == stay + units / 3
    assert last.weights == stay + units / (3 if zero == 3 else 1)


def test_offloaded_weights_leave_norms_and_a_tied_head_behind() -> None:
    """In one stage the tied embedding goes, too."""
    tied, offload = MODEL.replace(tied_head=True), ["parameters"]
    last, alone = residents(even(tied, offload=offload))[-1], residents(even(tied, pp=1, offload=offload))[0]
    assert (last.weights, last.host_weights_bytes) == (3 * NORMS + 128 + TABLE, 4 * 3 * MATRICES)
    assert (alone.weights, alone.host_weights_bytes) == (6 * NORMS + 128, 4 * (6 * MATRICES + TABLE))


LARGE = ModelSpec(name="large", layers=4, hidden=2048, heads=16, kv_heads=4, ffn=8192, vocab=8192, max_seq_len=256)


def test_an_update_brings_what_its_chunk_steps_and_no_more_than_three_parts() -> None:
    """Both moments in fp32, and the weights where these are away, too, norms not counted; a part is two buckets of four Mi
    elements, or the buckets that it has room for."""
    model = MODEL.replace(layers=8)
    for offload, each in ((["optimizer"], 8), (["optimizer", "parameters"], 12)):
        layout = even(model, dp=1, offload=offload)
        layout = bind(under("ministages", layout.plan, 2), model, layout.cluster)
        assert residents(layout)[0].update_bytes == pytest.approx(each * (2 * MATRICES + TABLE))
    (large,) = residents(even(LARGE, pp=1, dp=1, offload=["optimizer"]))
    assert large.update_bytes == 8 * 3 * 2 * 4 * 2**20
    # Under ZeRO-2 a layer has a bucket up to its matrix up, and one of down alone. Two replicas own halves: two layers are a
    # batch, in which a third layer's first bucket has no room. The first of them has the embedding, too.
    model = MODEL.replace(layers=10, hidden=768, heads=12, kv_heads=12, ffn=2048)
    bucket, layer = 4 * 768**2 + 2 * 768 * 2048, 4 * 768**2 + 3 * 768 * 2048
    assert layer < 2 * 4 * 2**20 < layer + bucket / 2
    halves, *_ = residents(even(model, pp=1, dp=2, zero=2, offload=["optimizer"]))
    assert halves.update_bytes == pytest.approx(8 * (3 * layer + 512 * 768 / 2), rel=1e-4)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_new_weights_pass_the_device_on_their_way_to_other_hosts(zero: int) -> None:
    """Unit by unit, in bf16, beside a copy of it where it is joined; under ZeRO-3 each keeps its own."""
    layout = even(pp=1, zero=zero, offload=["parameters"], precision="bf16")
    assert residents(layout, width=2)[0].update_bytes == (2 * (MATRICES + TABLE) if zero < 3 else 0)


def test_other_frameworks_buffers_are_in_what_was_fitted() -> None:
    plan = even(pp=1, zero=3, offload=["parameters"])
    assert [tuple(residents(plan, software)[0].moves) for software in (HETHUB, Software(gathers_ahead=False))] == [
        (True, True),
        (False, False),
    ]


def test_replicas_that_share_state_exchange_two_neighbouring_buckets() -> None:
    """All matrices of a small stage, two units of it where these come and go, or the only one that a chunk has; of each,
    what goes to the other two owners and comes from them, which two ranks map."""
    tied = MODEL.replace(tied_head=True)
    sent = 4 * 2 / 3

    def blocks(layout: Layout, width: int = 4) -> float:
        return residents(layout, width=width)[0].block_bytes

    assert [blocks(even(pp=1, dp=dp, zero=zero)) for dp, zero in ((3, 0), (1, 1))] == [0, 0]
    assert blocks(even(pp=1, zero=1)) == pytest.approx(sent * (6 * MATRICES + 2 * TABLE))
    assert blocks(even(pp=1, zero=2)) == pytest.approx(sent * (2 * MATRICES + TABLE))
    assert blocks(even(tied.replace(vocab=8192), pp=1, zero=2)) == pytest.approx(sent * (MATRICES + 16 * TABLE))
    assert blocks(even(pp=1, zero=1, precision="bf16"), width=2) == pytest.approx(sent * (6 * MATRICES + 2 * TABLE))
    assert blocks(even(pp=1, zero=1, offload=["parameters"])) == pytest.approx(sent * (2 * MATRICES + TABLE))
    layout = even(pp=1, zero=2)
    layered = bind(under("ministages", layout.plan, 6), MODEL, layout.cluster)
    assert blocks(layered) == pytest.approx(sent * (MATRICES + TABLE))


def test_blocks_hold_a_ranks_part_of_full_buckets() -> None:
    """Buckets of 4 Mi elements and a matrix: a rank of two tensor-parallel ones has half of each."""
    whole, half = (residents(even(LARGE, pp=1, dp=2, tp=tp, zero=1))[0].block_bytes for tp in (1, 2))
    assert whole == 4 * (4 * 2**20 + 8192 * 2048)  # twice that, of which half is its own
    assert half == pytest.approx(whole / 2, rel=1e-3)


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("chunks", [1, 4])
def test_large_matrices_are_buckets_of_their_own(zero: int, chunks: int) -> None:
    """Gate and up neighbour each other, in a chunk of one layer, too, where one of them was counted; a bucket may have up to
    four Mi elements more."""
    layout = even(LARGE, pp=1, zero=zero)
    layout = bind(under("ministages" if chunks > 1 else "1f1b", layout.plan, chunks), LARGE, layout.cluster)
    two = round(residents(layout)[0].block_bytes / 4 * 3 / 2)  # a third of which is its own
    assert 0 <= two - 2 * 8192 * 2048 <= 2 * 4 * 2**20


def around(layout: Layout, rank: int, software: Software = HETHUB, width: int = 4, **more: bool) -> dict[str, float]:
    own = layout.assignments[rank]
    widths = replica_widths(layout.model, layout.replica(own.stage, own.replica), software)[0]
    return surroundings(Shard(layout, own.stage, widths, software, width), own, **{"on_cpu": True, **more})


def test_what_surrounds_the_tensors_of_a_rank() -> None:
    """Rotations' two tables, messages or the hidden state, logits with their gradient in fp32 at least, a layer's results
    beside what MKL keeps."""
    model = MODEL.replace(ffn=384)
    tables, hidden, layer = 2 * 32 * 16, 32 * 128, 32 * (6 * 384 + 4 * 128)
    GiB, kept = 2**30, 11 * 2**20
    assert around(even(model, dp=1), 1) == {
        "buffers": 4 * (tables + 4 * hidden), "logits": 4 * 32 * 512, "temporaries": kept + 4 * layer, "communicator": 0,
        "framework": GiB / 4,
    }  # fmt: skip
    two = even(model, pp=1, dp=1, tp=2, precision="bf16")
    half = 32 * (6 * 384 / 2 + 4 * 128)
    assert around(two, 0, width=2) == {
        "buffers": 2 * (tables + hidden), "logits": (2 + 4) * 32 * 512 / 2, "temporaries": kept + 2 * half, "communicator": 0,
        "framework": GiB / 4,
    }  # fmt: skip
    device = even(model, "A100-SXM4-80GB", pp=1, dp=1, tp=2, precision="bf16")
    assert around(device, 0, width=2, on_cpu=False) == {
        "buffers": 2 * (tables + hidden), "logits": 10 * 32 * 512 / 2, "temporaries": 0, "communicator": 2.5 * GiB,
        "framework": int(1.2 * GiB),
    }  # fmt: skip


def test_logits_are_there_for_1024_tokens_at_a_time() -> None:
    """Other frameworks hold all of those that a rank has of the sequence."""
    layout = even(MODEL.replace(max_seq_len=4096), pp=1, dp=1, tp=2, seq=4096)
    assert around(layout, 0)["logits"] == 4 * 1024 * 512 / 2
    other = Software(chunked_loss=False, context_parallel=2)
    assert around(layout, 0, other)["logits"] == 4 * 4096 / 2 * 512


def test_pinned_states_and_activations_grow_as_their_largest_buffers() -> None:
    """Moments are brought eight Mi elements at a time; the largest tensor that a layer keeps is as wide as its MLP."""
    (small,) = rank_memory(even(device="A100-SXM4-80GB", pp=1, dp=1, offload=["optimizer"]))
    grown = 2**23 / (4 * parameters(tied=False))  # one buffer of 1.2 M elements
    assert 0.5 < 1 / grown < 1
    assert small.host_parts["optimizer"] == pytest.approx(8 * parameters(tied=False) * grown, rel=1e-4)
    plain, pinned = (
        rank_memory(even(device=device, pp=1, dp=1, seq=40, offload=["activations"]))[0].host_parts["activations"]
        for device in ("CPU-core", "A100-SXM4-80GB")
    )
    assert pinned == pytest.approx(plain * 2**16 / (4 * 40 * 344), rel=1e-4)
    (large,) = rank_memory(even(LARGE, "A100-SXM4-80GB", pp=1, dp=1, offload=["optimizer"]))
    (half,) = rank_memory(even(device="A100-SXM4-80GB", pp=1, dp=1, offload=["optimizer"], precision="bf16"))
    assert half.host_parts["optimizer"] == pytest.approx(
        small.host_parts["optimizer"] * 12 / 8
    )  # a master copy besides
    moments = 8 * (4 * LARGE.layer_parameters + 2 * 8192 * 2048 + 2048)
    assert large.host_parts["optimizer"] == pytest.approx(moments)  # in buffers of 32 MiB


def test_a_whole_gpt_has_its_parameters() -> None:
    model = MODEL.replace(family="gpt", gated=False)
    (alone,) = rank_widths(model, 1)
    assert RankParameters.of(model, alone).of_layers(6, True, True) == model.parameters


def test_tables_are_buckets_of_their_own() -> None:
    """Beside the first layer's queries, or the last one's down projection."""
    model = LARGE.replace(vocab=65536)
    first, *_, last = residents(even(model, zero=1))
    assert first.block_bytes / 4 * 3 / 2 >= 65536 * 2048 + 2048 * 2048
    assert last.block_bytes / 4 * 3 / 2 >= 65536 * 2048 + 8192 * 2048


@pytest.mark.parametrize(("zero", "matrices"), [(0, 0), (1, MATRICES * 4 / 3), (2, MATRICES * 4 / 3)])
def test_a_table_of_both_ends_is_a_bucket_of_all_their_ranks(zero: int, matrices: int) -> None:
    """Whatever the ZeRO level: every rank sends the parts of the other five, and is no part of the stage's own buckets."""
    first, middle, last = residents(even(MODEL.replace(tied_head=True, vocab=65536), pp=3, zero=zero))[::3]
    assert first.block_bytes == last.block_bytes == pytest.approx(4 * (65536 * 128 * 5 / 6 + matrices))
    assert middle.block_bytes == pytest.approx(4 * matrices)


def test_gradients_that_lie_apart_are_matrices() -> None:
    """Of two halves beside a whole the latter's are copied; alone nobody sums what several ranks hold of keys."""
    assert residents(cut([[1], [1, 1]], 1))[0].joined_bytes == 4 * (6 * MATRICES + 2 * TABLE)
    assert residents(even(pp=1, dp=1, tp=8))[0].joined_bytes == 0
    assert residents(even(pp=1, dp=2, tp=8), Software(gathers_ahead=False))[0].joined_bytes == 0
    offloaded = residents(cut([[1], [1, 1]], 1, offload=["parameters"]))[0]
    assert offloaded.joined_bytes == 4 * (6 * MATRICES + 2 * TABLE)
    assert offloaded.update_bytes == 4 * 2 * (MATRICES + TABLE)  # new weights of an end's unit, beside their parts


@pytest.mark.parametrize("rank", [0, 3])
def test_neighbours_lie_beside_each_other_at_a_models_ends(rank: int) -> None:
    """Weights of the layer at work and the next, gradients of the layer at work and the one before, with the embedding of
    the first layer or the head of the last."""
    stay, units = 3 * NORMS + 128 * (rank == 3), 3 * MATRICES + TABLE
    pair = 2 * MATRICES + TABLE
    offloaded, sharded = even(seq=8, offload=["parameters"]), even(seq=8, zero=2)
    assert rank_memory(offloaded)[rank].parts["weights"] == 4 * (stay + pair)
    assert rank_memory(sharded)[rank].parts["gradients"] == int(4 * (units / 3 + stay + pair))


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_tied_embedding_waits_for_the_microbatch_before(microbatches: int) -> None:
    """Its gradient is on the way when the next microbatch opens it again; with the only one two layers are at most beside
    it, where the first layer is announced."""
    layout = even(MODEL.replace(tied_head=True, vocab=8192), pp=1, seq=8, zero=3, batch=3 * microbatches)
    words, stay = 16 * TABLE, 6 * NORMS + 128
    parts = rank_memory(layout)[0].parts
    owned = (6 * MATRICES + words) / 3 + stay
    assert parts["weights"] == int(4 * (owned + 2 * MATRICES + words))
    assert parts["gradients"] == int(
        4 * (owned + (2 * MATRICES + words if microbatches == 1 else MATRICES + 2 * words))
    )
    full = rank_memory(even(MODEL.replace(tied_head=True, vocab=8192), pp=1, seq=8))[0].parts["activations"]
    assert (parts["activations"] < full / 2) is (microbatches == 1)


def test_chunks_free_what_all_microbatches_kept() -> None:
    """Two chunks that keep 1 and 4 of 10: the lower one goes down without the upper one's 4."""
    microbatches = HeldActivations(10.0, 0.5, (1.0, 4.0), 0.0)
    ways = [Descent(1, 2, 0.0, 7.0, 8.0), Descent(0, 0, 0.0, 7.0, 8.0), Descent(0, -1, 1.0, 7.0, 8.0)]
    assert list(_chunk_by_chunk(ways, microbatches)) == [Moment(kept, 7.0, 8.0) for kept in (9.0, 6.0, 5.5)]


def test_a_ranks_parts_are_what_it_has_and_what_surrounds_it() -> None:
    matrices = 6 * MATRICES + 2 * TABLE
    assert rank_memory(even(pp=1, zero=1))[0].parts["communicator"] == 4 * matrices * 2 // 3  # blocks, on a CPU
    whole = rank_memory(cut([[1], [1, 1]], 1))[0].parts
    layer = 11 * 2**20 + 4 * 16 * (6 * 344 + 4 * 128)
    assert whole["temporaries"] == layer + 4 * matrices - whole["activations"]  # joined when those are gone
    halves = [entry.parts["weights"] for entry in rank_memory(cut([[3, 1]], 0))]
    assert sum(halves) == 4 * (matrices + 2 * (6 * NORMS + 128))


@pytest.mark.parametrize("zero", [0, 1])
def test_joined_gradients_are_gone_when_an_update_comes(zero: int) -> None:
    """Each was counted as what it has beyond the activations: both together, a longer sequence needed less."""
    layout = cut([[1], [1, 1]], zero, offload=["optimizer"])
    of = residents(layout)[0]
    parts = rank_memory(layout)[0].parts
    layer = 11 * 2**20 + 4 * 16 * (6 * 344 + 4 * 128)
    extra = parts["optimizer"] + parts["activations"] + parts["temporaries"] - layer
    assert extra == pytest.approx(max(of.update_bytes, of.joined_bytes), abs=3)
    longer = bind(layout.plan.replace(seq_len=64), MODEL, layout.cluster)
    assert rank_memory(longer)[0].bytes > rank_memory(layout)[0].bytes


def test_what_a_sample_keeps_of_weights_gradients_put_off_and_of_tokens() -> None:
    """Of every product its input and its result's gradient (MicrobatchPass), but the residual's, which two layers share;
    of a token its id and whether the rank holds its row. Ranks that share the sequence keep their part of all."""
    layout = even(pp=1, dp=1, tp=2)
    whole, half = (
        kept_per_sample(layout, rank_widths(MODEL, 1)[0], Software(context_parallel=cp), 4, "none") for cp in (1, 2)
    )
    inputs, gradients = 2 * 128 + 128 + 344, 2 * 128 + 128 + 2 * 64 + 2 * 344
    assert whole.deferred_wgrad == 32 * 4 * (inputs + gradients - 128)
    assert whole.first == 32 * (8 + 1)
    assert whole == tuple(2 * part for part in half)
