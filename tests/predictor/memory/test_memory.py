"""Predicted memory against the runtime's own count of tensors, rank by rank."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hethub.predictor import RankMemory, predict, rank_memory
from hethub.predictor.cost.software import HETHUB
from hethub.predictor.memory.activations import KeptPerSample, held_microbatches
from hethub.predictor.memory.parameters import replica_widths
from hethub.predictor.memory.ranks import overfull_hosts, shortage
from hethub.predictor.memory.shards import Shard
from hethub.spec.layout.bind import Layout, bind
from hethub.spec.layout.execution import Kind, actions
from hethub.spec.layout.state import StateMap
from hethub.spec.model import ModelSpec
from hethub.spec.plan import SCHEDULES, PlanSpec
from hethub.spec.ranges import Range
from tests.predictor.plans import cluster, uniform

torch = pytest.importorskip("torch", reason="needs torch: pip install hethub[train]")

from hethub.runtime.memory.accounting import MemoryMeter  # noqa: E402
from hethub.runtime.model.initial import initialise  # noqa: E402
from hethub.runtime.model.stage import MicrobatchInput, Stage  # noqa: E402
from hethub.runtime.model.tensor_parallel import TensorGroup  # noqa: E402
from hethub.runtime.pace import Pace  # noqa: E402
from hethub.runtime.pipeline.itinerary import Itinerary, Visit  # noqa: E402
from hethub.runtime.pipeline.passes import MicrobatchPass  # noqa: E402
from hethub.runtime.state.reduction import Reducer  # noqa: E402
from hethub.runtime.state.storage import FlatMap, FlatStorage  # noqa: E402
from hethub.runtime.state.zero import ZeroManager  # noqa: E402
from tests.spec.random_plans import any_cases  # noqa: E402

GROUPED = ModelSpec(name="grouped", layers=6, hidden=128, heads=8, kv_heads=2, ffn=344, vocab=512, max_seq_len=256)
PLAIN = ModelSpec(
    name="plain", layers=6, hidden=128, heads=4, kv_heads=4, ffn=344, vocab=512, max_seq_len=256, tied_head=True
)


def counted_bytes(layout: Layout, rank: int) -> int:
    """Weights, gradients and kept tensors of a rank without tensor parallelism, all its microbatches in flight run
    forward."""
    assignment = layout.assignments[rank]
    storage = FlatStorage(StateMap(layout), assignment, layout.plan.precision, torch.device("cpu"))
    initialise(storage, layout.model, seed=0)
    stage = Stage(layout, assignment, storage, TensorGroup(None))
    meter = MemoryMeter([storage.weights, storage.grads, stage.cos, stage.sin])
    spec, seq = layout.replica(assignment.stage, assignment.replica), layout.plan.seq_len
    zero_manager = ZeroManager(Reducer(storage.state, storage, lambda ranks: None, spec.ranks), meter)
    zero_manager.start_step(10**6)
    in_flight, layers = layout.in_flight[assignment.stage][assignment.replica], range(len(stage.layers))
    visits = [Visit(Kind.FORWARD, layer) for _ in range(in_flight) for layer in layers]
    visits += [Visit(Kind.BACKWARD, layer) for layer in reversed(layers)]
    itinerary = Itinerary(zero_manager, visits, Pace())
    tokens = torch.zeros(spec.micro_batch, seq, dtype=torch.long)
    data = MicrobatchInput(batch=spec.micro_batch, tokens=tokens, targets=tokens)
    running = []
    with meter.counting():
        for _ in range(in_flight):
            x = None
            if not stage.is_first:
                x = torch.zeros(spec.micro_batch * seq, stage.hidden, dtype=storage.weights.dtype)
            running.append(MicrobatchPass(stage, itinerary, Range(0, len(stage.layers)), data, 1.0))
            result = running[-1].forward(x)
        running[0].backward(None if stage.is_last else torch.zeros_like(result))
    return storage.weights.nbytes + storage.grads.nbytes + meter.peak_bytes


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("model", [GROUPED, PLAIN], ids=lambda model: model.name)
def test_tensors_of_every_stage_are_foreseen(model: ModelSpec, recompute: str, precision: str) -> None:
    layout = uniform(
        model,
        cluster(("CPU-core", 1, 3)),
        tp=1,
        pp=3,
        micro_batch=2,
        batch=16,
        seq=128,
        precision=precision,
        recompute=recompute,
    )
    for entry in rank_memory(layout):
        parts = entry.parts["weights"] + entry.parts["gradients"] + entry.parts["activations"]
        assert parts == pytest.approx(counted_bytes(layout, entry.rank), rel=0.05)


@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(max_examples=400)
@given(data=st.data())
def test_the_samples_held_at_most_are_those_of_the_schedule(schedule: str, data: st.DataObject) -> None:
    """Walked action by action: a sample is held in every layer of a chunk from its forward to the last of its backwards,
    which under zero_bubble is that of the weights, until which it keeps another part of a layer."""
    layout = data.draw(any_cases(max_batch=20, schedule=schedule)).layout()
    kept = KeptPerSample(layer=1.0, input=0.0, products=0.0, first=0.0, last=0.0, deferred_wgrad=1.0)
    splits = layout.plan.defers_wgrad
    changes = {Kind.FORWARD: (1, 0), Kind.BACKWARD: (-1, 1 * splits), Kind.WEIGHT: (0, -1)}
    for assignment in layout.assignments:
        sizes = [chunk.size for chunk in layout.chunks(assignment.stage)]
        held, later, moments = 0, 0, dict[int, set[float]]()  # by layers with a sample, the bytes then
        by_chunk, beside = [0] * len(sizes), dict[int, set[tuple[int, int]]]()  # then held by the first and last chunk
        for action in actions(layout, assignment.stage, assignment.replica):
            if action.microbatch is not None:
                samples = action.microbatch.samples.size
                held += changes[action.kind][0] * samples * sizes[action.chunk]
                later += changes[action.kind][1] * samples * sizes[action.chunk]
                by_chunk[action.chunk] += changes[action.kind][0] * samples
            moments.setdefault(held + later, set()).add(held + 0.25 * later)
            beside.setdefault(held + later, set()).add((by_chunk[0], by_chunk[-1]))
        most, in_host = held_microbatches(layout, assignment, kept, sizes, HETHUB)
        less, _ = held_microbatches(layout, assignment, kept._replace(deferred_wgrad=0.25), sizes, HETHUB)
        assert (most.activations, in_host) == (max(moments), 0.0)
        assert less.activations in moments[max(moments)]
        with_ends, _ = held_microbatches(layout, assignment, kept._replace(first=1.0, last=1 / 1024), sizes, HETHUB)
        first, last = assignment.stage == 0, assignment.stage == layout.num_stages - 1
        ends = {first * embedded + last * scored / 1024 for embedded, scored in beside[max(moments)]}
        assert with_ends.activations - max(moments) in ends


@pytest.mark.parametrize("more", [{}, {"recompute": "full"}, {"offload": ["activations"]}], ids=str)
def test_a_microbatch_holds_no_more_than_its_replica_has(more: dict[str, object]) -> None:
    """Logits, buffers and the layer at work were counted for all of a micro_batch above the replica's samples."""
    for device in ("CPU-core", "A100-SXM4-80GB"):
        exact, above = (
            uniform(GROUPED, cluster((device, 1, 2)), tp=1, pp=2, micro_batch=size, batch=4, seq=128, precision="fp32", **more)
            for size in (4, 64)
        )  # fmt: skip
        assert rank_memory(above) == rank_memory(exact)


def of_two(first: str, other: str, replicas: tuple[dict[str, Any], dict[str, Any]], **stage: Any) -> Layout:
    """Two stages, the first with a replica on either device, the second with one on two more of the second's sort."""
    on = cluster((first, 1, 1), (other, 1, 3))
    own = [{"ranks": [rank], "micro_batch": 1, "samples": 8, **more} for rank, more in enumerate(replicas)]
    samples = sum(replica["samples"] for replica in own)
    last = {"ranks": [2, 3], "micro_batch": 1, "samples": samples}
    plan = {
        "model": GROUPED.name, "cluster": on.name, "global_batch": samples, "seq_len": 64, "precision": "fp32",
        "stages": [{"layers": [[0, 3]], "replicas": own, "zero": 1, **stage}, {"layers": [[3, 6]], "replicas": [last]}],
    }  # fmt: skip
    return bind(PlanSpec.model_validate(plan), GROUPED, on)


IN_FOURS = {"micro_batch": 4, "in_flight": 2}


@pytest.mark.parametrize(
    "layout",
    [
        of_two("A100-SXM4-80GB", "A100-SXM4-80GB", ({"in_flight": 4}, {"in_flight": 6})),
        of_two("A100-SXM4-80GB", "A100-SXM4-80GB", (IN_FOURS, {**IN_FOURS, "samples": 7})),
        of_two("A100-SXM4-80GB", "A100-SXM4-80GB", ({}, {}), state_shares={0: 0.8}),
        of_two("CPU-core", "A100-SXM4-80GB", ({}, {}), offload=["optimizer"]),
        of_two("A100-SXM4-80GB", "V100-SXM2-32GB", ({}, {})),
    ],
    ids=["in flight", "samples", "shares", "host", "device"],
)
def test_a_ranks_memory_does_not_depend_on_who_was_counted_before(layout: Layout) -> None:
    """Equal ranks are counted once; those of this stage are unlike."""
    found = rank_memory(layout)
    assert found == [entry for rank in range(4) for entry in rank_memory(layout, only=[rank])]
    assert found[0]._replace(rank=1) != found[1]


def test_a_rank_fits_while_its_reserve_stays_free() -> None:
    entry = RankMemory(0, "own", 94, 100, {}, 0, {})
    assert [entry._replace(bytes=held).fits(0.06) for held in (94, 95, 100)] == [True, False, False]


def test_the_ranks_of_a_machine_share_its_host_memory() -> None:
    """In GiB, as a refusal says it; another machine has its own, and what lies on accelerators does not count."""
    on = cluster(("A100-SXM4-80GB", 2, 2))
    on = on.replace(nodes=tuple(node.replace(host_memory_gb=1.0) for node in on.nodes))
    for more in (0, 1):
        held = (2**29, 2**29 + more, 2**30, 0)
        used = [RankMemory(rank, "own", 2**40, 2**41, {}, own, {}) for rank, own in enumerate(held)]
        assert [found for _, found in overfull_hosts(on, used)] == [2**30 + 1] * more


def test_all_that_a_cpus_ranks_hold_lies_in_their_hosts_memory() -> None:
    """Both of a machine of 8 GiB held 3 GiB and offloaded 4 more, and each amount fitted by itself: the kernel ends one."""
    on = cluster(("CPU-core", 1, 2))
    for more in (0, 1):
        used = [RankMemory(rank, "CPU-core", 3 * 2**30, 4 * 2**30, {}, 2**30 + more, {}) for rank in (0, 1)]
        assert [found for _, found in overfull_hosts(on, used)] == [8 * 2**30 + 2] * more
    layout = uniform(GROUPED, on, tp=1, pp=2, micro_batch=1, batch=4, seq=64, precision="fp32", offload=["optimizer"])
    needed = sum(entry.bytes + entry.host_bytes for entry in rank_memory(layout)) / 2**30
    for part, fits in ((1.01, True), (0.99, False)):
        given = on.replace(nodes=tuple(node.replace(host_memory_gb=part * needed) for node in on.nodes))
        assert predict(Layout(layout.plan, GROUPED, given)).fits is fits
        assert ("on CPUs all else" in (shortage(layout.on(given), rank_memory(layout), 0.06) or "")) is not fits


def test_host_memory_that_the_cluster_does_not_give_is_a_guess_that_the_answer_names() -> None:
    """As much as the machine's accelerators have. Said where state is offloaded, not of a checkpoint's copy alone."""
    on = cluster(("A100-SXM4-80GB", 2, 2))
    used = [RankMemory(rank, "own", 0, 1, {}, held, {}) for rank, held in enumerate((80 * 2**30, 80 * 2**30 + 1, 1, 0))]
    assert [found for _, found in overfull_hosts(on, used)] == [160 * 2**30 + 1]
    plain = uniform(GROUPED, on, tp=1, pp=2, micro_batch=1, batch=4, seq=64, precision="fp32")
    first, last = plain.stages
    offloading = Layout(plain.plan.replace(stages=(first.replace(offload=("optimizer",)), last)), GROUPED, on)
    assert predict(plain).assumed_hosts == ()
    (found,) = predict(offloading).assumed_hosts
    held = sum(entry.host_bytes for entry in rank_memory(offloading, only=[0, 1]))
    assert found == (on.nodes[0].name, held, 160 * 2**30)
    assert "160 GiB are assumed" in found.sentence()
    given = on.replace(nodes=tuple(node.replace(host_memory_gb=512.0) for node in on.nodes))
    assert predict(Layout(offloading.plan, GROUPED, given)).assumed_hosts == ()


def test_the_last_stage_alone_has_logits() -> None:
    on = cluster(("A100-SXM4-80GB", 1, 3))
    layout = uniform(GROUPED, on, tp=1, pp=3, micro_batch=1, batch=3, seq=64, precision="fp32")
    assert [entry.parts["logits"] > 0 for entry in rank_memory(layout)] == [False, False, True]


@pytest.mark.parametrize("others", [0, 1, 2])
def test_an_accelerator_alone_on_its_island_has_no_communicator(others: int) -> None:
    """Beside another maker's it had one in the account: what it sends them passes host memory."""
    on = cluster(("A100-SXM4-80GB", 1, 1), *[("MI250X-GCD", 1, others)] * (others > 0))
    layout = uniform(GROUPED, on, tp=1, pp=1, micro_batch=1, batch=2 * on.size, seq=64, precision="fp32", zero=1)
    found = [entry.parts["communicator"] > 0 for entry in rank_memory(layout)]
    assert found == [False, *[others == 2] * others]


LARGE = ModelSpec(name="large", layers=3, hidden=2048, heads=16, kv_heads=4, ffn=8192, vocab=8192, max_seq_len=256)


@pytest.mark.parametrize(
    "model", [GROUPED.replace(kv_heads=4), LARGE, LARGE.replace(hidden=8192)], ids=lambda model: model.hidden
)
@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.parametrize(
    "cuts",
    [
        [[1], [3, 1]],  # joined on the first alone: the ranks of the other were counted so too
        [[1, 1], [1, 1, 1, 1]],  # explicitly equal, as equal by default
        [[1, 1], [3, 1]],
        [[1], [1, 1], [1, 1, 1, 1, 1, 1, 1, 1]],  # eight ranks hold the same four KV heads by twos
        [[1] * 8, [1] * 8],  # cut alike, but keys and values are summed over twice the ranks: nothing was counted
    ],
    ids=str,
)
def test_gradients_are_joined_where_their_parts_lie_apart(cuts: list[list[float]], zero: int, model: ModelSpec) -> None:
    """Where every matrix fills a bucket, all of them were counted and none is copied. At most keys and values are counted
    that touch each other, where ranks of a replica hold the same heads."""
    replicas, first = [], 0
    for shares in cuts:
        ranks = list(range(first, first := first + len(shares)))
        given = {"tensor_shares": shares} if len(shares) < 8 else {}
        replicas.append({"ranks": ranks, "micro_batch": 1, "samples": 1, **given})
    on = cluster(("CPU-core", 1, first))
    plan = {
        "model": model.name, "cluster": on.name, "global_batch": len(cuts), "seq_len": 16, "precision": "fp32",
        "stages": [{"layers": [[0, model.layers]], "replicas": replicas, "zero": zero}],
    }  # fmt: skip
    layout = bind(PlanSpec.model_validate(plan), model, on)
    state = StateMap(layout)

    def joined(rank: int) -> float:
        """The part of the rank's matrices that it copies to sum them with others."""
        held = FlatMap(state.held_by(layout.assignment_of[rank]))
        pieces = [(bucket, piece) for bucket in state.buckets if bucket.decays for piece in bucket.pieces]
        own = [(bucket.unit, piece) for bucket, piece in pieces if rank in piece.group.contributors]
        apart = [(unit, piece) for unit, piece in own if len(held.locals(piece.runs)) > 1]
        if zero:  # a unit is copied as a whole (hethub.runtime.state.zero_gradients)
            apart = [(unit, piece) for unit, piece in own if unit in dict(apart)]
        return sum(piece.numel for _, piece in apart) / sum(piece.numel for _, piece in own)

    for number, spec in enumerate(layout.stages[0].replicas):
        shard = Shard(layout, 0, replica_widths(model, spec, HETHUB)[0], HETHUB, 4)
        assert 0.0 <= shard.joined(number) - max(map(joined, spec.ranks)) < 0.16
