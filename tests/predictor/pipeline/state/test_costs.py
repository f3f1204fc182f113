"""Collectives over a stage's replicas are priced by where these are, not by the order in which a plan names them."""

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest

from hethub.predictor import predict
from hethub.predictor.cost.constants import packaged
from hethub.predictor.cost.links import Network
from hethub.predictor.cost.resources import Resource
from hethub.predictor.cost.software import HETHUB
from hethub.predictor.pipeline.costs import PlanCosts
from hethub.predictor.pipeline.state.costs import Portion, StateCosts
from hethub.predictor.pipeline.step import step_times
from hethub.spec.cluster import ClusterSpec
from hethub.spec.layout.bind import Layout, bind
from hethub.spec.layout.execution import Kind
from hethub.spec.layout.state import StateMap
from hethub.spec.model import ModelSpec
from hethub.spec.plan import PlanSpec
from tests.predictor.plans import LLAMA_8B, cluster, uniform


def one_stage(
    on: ClusterSpec,
    *replicas: list[int],
    model: ModelSpec = LLAMA_8B,
    shares: tuple[float, ...] | None = None,
    **stage: Any,
) -> Layout:
    given = [{"ranks": ranks, "micro_batch": 1, "samples": 8, "tensor_shares": shares} for ranks in replicas]
    plan = {
        "model": model.name, "cluster": on.name, "global_batch": 8 * len(replicas), "seq_len": 2048, "precision": "bf16",
        "stages": [{"layers": [[0, model.layers]], "replicas": given, "zero": 1, **stage}],
    }  # fmt: skip
    return bind(PlanSpec.model_validate(plan), model, on)


@pytest.mark.parametrize("smaller", [2, 4])
@pytest.mark.parametrize("tp", [1, 2])
def test_the_order_of_equal_replicas_changes_nothing(smaller: int, tp: int) -> None:
    """Machines of 8 and of fewer accelerators: those of the first replica told how many groups share a card."""
    on = cluster(("A100-SXM4-80GB", 1, 8), ("A100-SXM4-80GB", 2, smaller), gbps=25.0)
    replicas = [list(range(first, first + tp)) for first in range(0, on.size, tp)]
    one, other = (predict(one_stage(on, *own)) for own in (replicas, replicas[::-1]))
    assert other.step_seconds == pytest.approx(one.step_seconds, rel=1e-6)


def test_state_shares_of_all_ranks_tell_what_each_position_exchanges() -> None:
    """They were taken for fractions of what the ranks at one position step, of which there are two here."""
    on = cluster(("A100-SXM4-80GB", 1, 2), ("MI250X-GCD", 1, 4))
    layout = one_stage(on, [0, 1], [2, 3], [4, 5], state_shares={0: 0.05, 1: 0.05})
    costs = StateCosts(layout, HETHUB, Network(on), lambda stage, portion: (1.0, 2.0))
    for position in (0, 1):
        owned = costs.rings.group(0, position).owned
        assert owned is not None
        assert owned.by_island == pytest.approx((0.1, 0.9))


def test_both_ends_of_a_tied_head_send_its_new_weights() -> None:
    """In bf16, of each of the ranks that step a part: half the bytes that summing its gradients took."""
    on, model = cluster(("A100-SXM4-80GB", 2, 1)), LLAMA_8B.replace(tied_head=True)
    layout = uniform(model, on, tp=1, pp=2, micro_batch=1, batch=2, seq=1024)
    network, table = Network(on), model.vocab * model.hidden
    costs = StateCosts(layout, HETHUB, network, lambda stage, portion: (1.0, 2.0))
    for stage in (0, 1):
        found = costs.reduction(stage)
        assert found.tail_seconds == found.seconds  # it waits for the last backward of the first stage
        assert found.seconds == pytest.approx(network.reduce_scatter(network.group([0, 1]), 4 * table), rel=0.01)
        assert found.gather_seconds == pytest.approx(network.reduce_scatter(network.group([0, 1]), 2 * table), rel=0.01)


@pytest.mark.parametrize(("hidden", "layers", "waits"), [(64, 2, False), (8192, 32, True)])
def test_the_sum_of_a_tied_head_waits_for_the_bytes_of_others_alone(hidden: int, layers: int, waits: bool) -> None:
    """Its group has both ends' ranks, those of a stage its own: they wait for what takes the same links. Both were added up,
    latencies and all: steps of small layers were up to 19 % shorter in rehearsals."""
    on = cluster(("A100-SXM4-80GB", 4, 1))
    model = LLAMA_8B.replace(tied_head=True, hidden=hidden, ffn=2 * hidden, vocab=hidden, layers=layers)
    layout = uniform(model, on, tp=1, pp=2, micro_batch=1, batch=4, seq=1024, zero=1)
    costs = StateCosts(layout, HETHUB, Network(on), lambda stage, portion: (1.0, 2.0))
    alone, tied = costs._over_replicas(1, None).tail_seconds, costs.tied.seconds
    expected = alone + tied if waits else max(alone, tied)
    assert costs.reduction(1).tail_seconds == pytest.approx(expected, rel=0.03)


def test_a_tied_head_is_summed_where_the_first_stages_shares_say() -> None:
    """One rank of four owns all of it, and all that the other island has goes over its staging, in a collective of uneven
    parts. Pairs with equal parts were priced: a step of 11.1 ms took 19.1 in a rehearsal."""
    on, model = cluster(("A100-SXM4-80GB", 1, 2), ("MI250X-GCD", 1, 2), gbps=1000), LLAMA_8B.replace(tied_head=True)
    layout = uniform(model, on, tp=1, pp=2, micro_batch=1, batch=4, seq=1024, zero=1)
    first, last = layout.plan.stages
    layout = bind(layout.plan.replace(stages=(first.replace(state_shares={1: 0.0}), last)), model, on)
    (table,) = (p for bucket in StateMap(layout).buckets for p in bucket.pieces if len(p.group.contributors) == 4)
    assert [cut.size for cut in table.cuts] == [model.vocab * model.hidden, 0, 0, 0]
    network = Network(on)
    costs = StateCosts(layout, HETHUB, network, lambda stage, portion: (1.0, 2.0))
    assert costs.tied.seconds == pytest.approx(1.25 * 4 * table.numel / network.staging_rate, rel=0.02)
    assert sum(costs.most_parameters(stage) for stage in (0, 1)) + table.numel == model.parameters


@pytest.mark.parametrize("once", [True, False])
def test_every_gradient_is_summed_once(once: bool) -> None:
    """Over replicas or, of a tied head, over both ends: no parameter in two sums. Other frameworks sum both copies over
    replicas, and once more with each other."""
    on, model = cluster(("A100-SXM4-80GB", 4, 1)), LLAMA_8B.replace(tied_head=True)
    layout = uniform(model, on, tp=1, pp=2, micro_batch=1, batch=4, seq=1024, zero=1)
    software, table = replace(HETHUB, one_tied_copy=once), model.vocab * model.hidden
    costs = StateCosts(layout, software, Network(on), lambda stage, portion: (1.0, 2.0))
    summed = sum(costs.most_parameters(stage) for stage in (0, 1))
    assert summed + (table if once else -table) == model.parameters


def test_copies_of_a_tied_head_are_summed_when_the_slowest_pair_is() -> None:
    """Other frameworks sum both ends in pairs, replica by replica: here one pair on a machine, one over 1 Gbit/s."""
    on, model = cluster(("A100-SXM4-80GB", 1, 3), ("A100-SXM4-80GB", 1, 1), gbps=1.0), LLAMA_8B.replace(tied_head=True)
    layout = uniform(model, on, tp=1, pp=2, micro_batch=1, batch=2, seq=1024)
    network, num_bytes = Network(on), 4 * model.vocab * model.hidden
    costs = StateCosts(layout, replace(HETHUB, one_tied_copy=False), network, lambda stage, portion: (1.0, 2.0))
    pairs = [network.all_reduce(network.group(pair), num_bytes) for pair in ([0, 2], [1, 3])]
    assert pairs[0] < 0.1 * pairs[1]
    assert costs.tied.seconds >= pairs[1]


def test_pairs_that_sum_a_tied_head_share_their_cards() -> None:
    """Four pairs over the four cards of two machines: none has more than one card."""
    on, model = cluster(("A100-SXM4-80GB", 2, 4), gbps=1.0), LLAMA_8B.replace(tied_head=True)
    layout = uniform(model, on, tp=1, pp=2, micro_batch=1, batch=4, seq=1024)
    network, num_bytes = Network(on), 4 * model.vocab * model.hidden
    costs = StateCosts(layout, replace(HETHUB, one_tied_copy=False), network, lambda stage, portion: (1.0, 2.0))
    assert costs.tied.seconds == pytest.approx(4 * num_bytes / network.rate(Resource("cards", 0)), rel=1e-3)


def test_norms_by_themselves_are_all_that_do_not_decay() -> None:
    """Two of every layer, and the final one."""
    layout = one_stage(cluster(("A100-SXM4-80GB", 2, 1), gbps=0.01), [0], [1], model=LLAMA_8B.replace(layers=1))
    costs = StateCosts(layout, HETHUB, Network(layout.cluster), lambda stage, portion: (1.0, 2.0))
    norms = sum(placed.info.numel for placed in StateMap(layout).tensors if not placed.info.decays)
    assert costs.norms_seconds(0, costs.whole[0]) == pytest.approx(costs.rings.seconds(0, 2 * norms), rel=1e-9)


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_layers_by_themselves_sum_all_of_a_stage(layers: int) -> None:
    """The embedding with the first, the head with the last, over a link so slow that nothing else counts."""
    model, on = LLAMA_8B.replace(layers=layers), cluster(("A100-SXM4-80GB", 2, 1), gbps=0.01)
    layout = one_stage(on, [0], [1], model=model, zero=2)
    costs = StateCosts(layout, HETHUB, Network(on), lambda stage, portion: (1.0, 2.0))
    each = costs.reduce_seconds(0, costs.whole[0])
    assert len(each) == layers
    assert sum(each) == pytest.approx(costs.rings.seconds(0, 4 * model.parameters), rel=1e-6)


@pytest.mark.parametrize(
    ("schedule", "layers", "comes"),
    [
        ("1f1b", 4, (1, 1)),
        ("1f1b", 2, (0, 0)),
        ("zero_bubble", 4, (2, 1)),
        ("layered", 4, (2, 1)),
        ("layered", 2, (1, 0)),
    ],
)
@pytest.mark.parametrize("offload", [[], ["parameters"]])
def test_a_tied_embedding_comes_where_a_pass_ends(
    schedule: str, layers: int, comes: tuple[int, int], offload: list[str]
) -> None:
    """As a run counts it (tests/runtime/state/test_zero.py), over a link so slow that nothing else counts. It was priced as a
    part of the first layer: rehearsed steps were up to 18 % longer."""
    model, on = LLAMA_8B.replace(layers=layers, tied_head=True), cluster(("A100-SXM4-80GB", 2, 1), gbps=0.01)
    plan = one_stage(on, [0], [1], model=model, zero=3, offload=offload).plan.replace(schedule=schedule)
    costs = PlanCosts(Layout(plan, model, on), HETHUB, packaged()).state
    table = costs.rings.seconds(0, 2 * model.vocab * model.hidden)
    inner = costs.rings.seconds(0, 2 * layers * model.layer_parameters)
    for kind, times in zip((Kind.FORWARD, Kind.BACKWARD), comes, strict=True):
        assert sum(costs.gather_seconds(0, costs.whole[0], kind)) == pytest.approx(inner + times * table, rel=0.01)
    assert sum(costs.reduce_seconds(0, costs.whole[0])) == pytest.approx(2 * (inner + table), rel=1e-3)


@pytest.mark.parametrize("offload", [[], ["optimizer"]])
def test_a_replica_steps_as_long_as_its_slowest_rank(offload: list[str]) -> None:
    """Whichever comes first: an A100 before an L4 stepped what both have in 0.10 s, behind it in 0.67 s."""
    seconds = []
    for devices in (("A100-SXM4-80GB", "L4"), ("L4", "A100-SXM4-80GB"), ("L4", "L4")):
        on = cluster(*((device, 1, 1) for device in devices))
        costs = PlanCosts(one_stage(on, [0, 1], zero=0, offload=offload), HETHUB, packaged())
        seconds.append(costs.optimizer(0, 0))
    assert seconds[0] == seconds[1] == seconds[2]


def test_a_replica_steps_as_long_as_its_rank_with_the_largest_share() -> None:
    """Whichever of its ranks that is."""
    on = cluster(("A100-SXM4-80GB", 1, 4))
    for rank in (0, 1):
        costs = PlanCosts(one_stage(on, [0, 1], [2, 3], state_shares={rank: 0.7}), HETHUB, packaged())
        expected = costs.layer_cost(0).optimizer(0.7 * LLAMA_8B.parameters)
        assert costs.optimizer(0, 0) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("zero", "share"), [(1, 0.5), (3, 0.5), (1, 0.98)])
def test_weights_come_once_the_slowest_owner_has_stepped(zero: int, share: float) -> None:
    """To all alike, in every shortcut, whichever replica that is: the slower one, or the faster one with so large a share."""
    seconds = []
    for devices in (("A100-SXM4-80GB", "L4"), ("L4", "A100-SXM4-80GB")):
        on = cluster(*((device, 1, 1) for device in devices), gbps=50)
        shares = {devices.index("A100-SXM4-80GB"): share} if share != 0.5 else {}
        layout = one_stage(on, [0], [1], zero=zero, state_shares=shares)
        costs = PlanCosts(layout, HETHUB, packaged())
        updates = [costs.optimizer(0, replica) for replica in range(2)]
        assert max(updates) > 5 * min(updates)
        seconds += [step_times(layout, costs, full=full).seconds for full in (False, True)]
    assert seconds == [pytest.approx(seconds[0])] * 4


@pytest.mark.parametrize("ends", [([0], [1, 2]), ([0, 1], [2])])
def test_a_tied_table_is_summed_as_the_narrower_end_holds_it(ends: tuple[list[int], list[int]]) -> None:
    """All of it, where one end does not cut it."""
    on, model = cluster(("A100-SXM4-80GB", 1, 3)), LLAMA_8B.replace(tied_head=True)
    plan = uniform(model, cluster(("A100-SXM4-80GB", 1, 2)), tp=1, pp=2, micro_batch=1, batch=2, seq=1024).plan
    stages = [
        stage.replace(replicas=(stage.replicas[0].replace(ranks=tuple(ranks)),))
        for stage, ranks in zip(plan.stages, ends, strict=True)
    ]
    state = PlanCosts(Layout(plan.replace(stages=stages), model, on), HETHUB, packaged()).state
    summed = state.network.reduce_scatter(state.network.group([0, 1]), 4 * model.vocab * model.hidden)
    assert state.tied.seconds == pytest.approx(summed)


@pytest.mark.parametrize("what", ["parameters", "activations"])
def test_copies_take_as_long_as_on_the_rank_with_the_slowest_host(what: str) -> None:
    """Whichever comes first: an A100's PCIe has half the rate of an H100's."""
    seconds = []
    for devices in (("A100-SXM4-80GB", "H100-SXM5-80GB"), ("H100-SXM5-80GB", "A100-SXM4-80GB")):
        on = cluster(*((device, 1, 1) for device in devices))
        costs = PlanCosts(one_stage(on, [0, 1], offload=[what]), HETHUB, packaged())
        found = costs.microbatch(0, 0, 1)
        seconds.append((found.forward.dp, found.backward.dp))
        if what == "parameters":  # alone beside a forward too short to hide any
            copied = 2 * costs.state.most_parameters(0) / (32e9 * packaged().links["host_copy_fraction"])
            assert sum(costs.state.gather_seconds(0, costs.state.whole[0])) == pytest.approx(copied, rel=1e-3)
    assert seconds[0] == seconds[1]
    assert seconds[0][0] > 0


def test_a_replica_copies_what_its_fullest_rank_keeps() -> None:
    """Over a host that compute hides nothing of: of three quarters of the columns more than of half of them."""
    on = cluster(("A100-SXM4-80GB", 1, 2))
    on = on.replace(links=on.links.replace(staging=on.links.staging.replace(per_host_gbytes_per_second=0.1)))
    uneven, even = (
        PlanCosts(one_stage(on, [0, 1], offload=["activations"], shares=shares), HETHUB, packaged())
        for shares in ((3.0, 1.0), (1.0, 1.0))
    )
    assert uneven.microbatch(0, 0, 1).forward.dp > 1.2 * even.microbatch(0, 0, 1).forward.dp


def test_unlike_degrees_sum_what_the_narrowest_ranks_hold() -> None:
    """A rank of a narrow replica takes part in the sums of several positions."""
    narrow, wide, both = (
        PlanCosts(one_stage(cluster(("A100-SXM4-80GB", 1, ranks[-1][-1] + 1)), *ranks), HETHUB, packaged())
        for ranks in (([0, 1], [2, 3]), ([0, 1, 2, 3], [4, 5, 6, 7]), ([0, 1, 2, 3], [4, 5]))
    )
    assert both.state.most_parameters(0) == narrow.state.most_parameters(0) > 1.9 * wide.state.most_parameters(0)


def test_uneven_shares_cost_what_cephalo_found() -> None:
    """A quarter for one of two ranks leaves half of the buckets even; the others take 1.25 times as long."""
    layout = one_stage(cluster(("A100-SXM4-80GB", 2, 1)), [0], [1], zero=2, state_shares={0: 0.25})
    network = Network(layout.cluster)
    costs = StateCosts(layout, HETHUB, network, lambda stage, portion: (1.0, 2.0))
    layer = Portion(1, False, False)
    even = network.reduce_scatter(network.group([0, 1]), 4 * LLAMA_8B.layer_parameters)
    assert costs.reduce_seconds(0, layer) == pytest.approx([1.125 * even])


@pytest.mark.parametrize("heads", [8, 2])
@pytest.mark.parametrize("degrees", [(4, 4), (1, 4, 1), (2, 4), (2, 8), (1, 2, 8)])
def test_gradients_are_priced_in_the_groups_that_sum_them(degrees: tuple[int, ...], heads: int) -> None:
    """Each rank on a machine of its own, so that a group tells its ranks. Of degrees 2 and 4 the second rank of two was
    priced beside all but the first of four, and heads of keys and values that ranks share were not."""
    on, model = cluster(("A100-SXM4-80GB", sum(degrees), 1)), LLAMA_8B.replace(kv_heads=heads)
    ends = list(accumulate(degrees, initial=0))
    layout = one_stage(on, *(list(range(*own)) for own in pairwise(ends)), model=model, zero=2)
    network = Network(on)
    costs = StateCosts(layout, HETHUB, network, lambda stage, portion: (1.0, 2.0))
    pieces = [piece for bucket in StateMap(layout).buckets for piece in bucket.pieces]
    summed = {network.group(piece.group.contributors).machines for piece in pieces}
    assert {ring.group.machines for ring in costs.rings.unlike(0)} == summed


@pytest.mark.parametrize(
    "replicas",
    [
        (1, 1), (2, 1), (1, 4), (2, 4), (4, 1, 2),
        ((3, 1), 1), (1, (3, 1)), ((3, 1), 2), ((3, 1), (1, 3)), ((3, 3, 2), 1, 2), ((3, 1), (3, 1)),
    ],
    ids=str,
)  # fmt: skip
def test_every_piece_is_priced_as_the_state_map_cuts_it(replicas: tuple[int | tuple[int, ...], ...]) -> None:
    """By degree or shares of each replica: which ranks sum a piece, how much of a layer it is, and what each of them steps of
    it. Replicas of unlike degrees were priced as equal parts in one piece, up to a quarter of a step too short over a
    bridge; and those of uneven shares beside others as if they were even."""
    degrees = [own if isinstance(own, int) else len(own) for own in replicas]
    ends = list(accumulate(degrees, initial=0))
    on, model = (
        cluster(("MI250X-GCD", 1, ends[1]), ("A100-SXM4-80GB", 1, ends[-1] - ends[1])),
        LLAMA_8B.replace(layers=8),
    )
    given = [
        {"ranks": list(range(*own)), "micro_batch": 1, "samples": 8, "tensor_shares": None if isinstance(shares, int) else shares}
        for own, shares in zip(pairwise(ends), replicas, strict=True)
    ]  # fmt: skip
    plan = {
        "model": model.name, "cluster": on.name, "global_batch": 8 * len(given), "seq_len": 2048, "precision": "bf16",
        "stages": [{"layers": [[0, model.layers]], "replicas": given, "zero": 2}],
    }  # fmt: skip
    layout = bind(PlanSpec.model_validate(plan), model, on)
    costs = StateCosts(layout, HETHUB, Network(on), lambda stage, portion: (1.0, 2.0))
    mapped = [p for bucket in StateMap(layout).buckets if bucket.decays for p in bucket.pieces]
    priced = costs.rings.pieces(0)
    assert {piece.ranks for piece in priced} == {piece.group.contributors for piece in mapped}
    for index, piece in enumerate(priced):
        own = [each for each in mapped if each.group.contributors == piece.ranks]
        of_layers = sum(each.numel for each in own) / sum(each.numel for each in mapped)
        same = [each.part for each in priced if each.ranks == piece.ranks]
        assert sum(same) == pytest.approx(of_layers, rel=0.01)
        stepped = [sum(cut.size for cut in cuts) for cuts in zip(*(each.cuts for each in own), strict=True)]
        amd = sum(stepped[: sum(rank < ends[1] for rank in piece.ranks)]) / sum(stepped)
        owned = costs.rings.group(0, index).owned
        assert (owned.by_island if owned else (1 / len(given), 1 - 1 / len(given))) == pytest.approx(
            (amd, 1 - amd), abs=0.01
        )


@pytest.mark.parametrize("degrees", [(2, 1), (1, 4), (2, 4), (4, 1, 2)])
def test_bytes_of_pieces_go_one_after_the_other_and_latencies_beside_each_other(degrees: tuple[int, ...]) -> None:
    """Their groups do not wait for each other: steps of small layers were up to half as long again."""
    ends = list(accumulate(degrees, initial=0))
    on = cluster(("MI250X-GCD", 1, ends[1]), ("A100-SXM4-80GB", 1, ends[-1] - ends[1]))
    layout = one_stage(on, *(list(range(*own)) for own in pairwise(ends)), model=LLAMA_8B.replace(layers=8), zero=2)
    network = Network(on)
    costs = StateCosts(layout, HETHUB, network, lambda stage, portion: (1.0, 2.0))
    (bucket, *_) = (bucket for bucket in StateMap(layout).buckets if bucket.decays)
    met = max(sum(rank in piece.group.contributors for piece in bucket.pieces) for rank in range(on.size))
    for num_bytes, times in ((1e-6, 1), (1e12, met)):
        longest = max(
            network.reduce_scatter(ring.group, ring.part * num_bytes, ring.sharing) for ring in costs.rings.unlike(0)
        )
        assert 0.999 * times * longest <= costs.rings.seconds(0, num_bytes) <= 1.25 * times * longest


def test_groups_that_meet_the_same_rank_take_turns() -> None:
    """A replica of one rank beside one of two: both groups pass the one rank, whose halves go one after the other. On a
    machine with more accelerators they were priced as at once, too, which took twice as long."""
    on = cluster(("A100-SXM4-80GB", 1, 3), ("A100-SXM4-80GB", 1, 2), gbps=10)
    replicas = [{"ranks": ranks, "micro_batch": 1, "samples": 8} for ranks in ([0], [3, 4])]
    plan = {
        "model": LLAMA_8B.name, "cluster": on.name, "global_batch": 16, "seq_len": 2048, "precision": "bf16",
        "stages": [{"layers": [[0, LLAMA_8B.layers]], "replicas": replicas}], "unused": [1, 2],
    }  # fmt: skip
    network = Network(on)
    costs = StateCosts(bind(PlanSpec.model_validate(plan), LLAMA_8B, on), HETHUB, network, lambda s, p: (1.0, 2.0))
    empty, alone = (network.reduce_scatter(network.group([0, 3]), each, 1, "all_reduce") for each in (1e-6, 1e9))
    assert costs.rings.seconds(0, 2e9) == pytest.approx(empty + 2 * (alone - empty))


@pytest.mark.parametrize(("degree", "heads"), [(4, 1), (8, 2), (8, 4)])
def test_heads_that_ranks_share_are_summed_whole(degree: int, heads: int) -> None:
    """The state map tells what each group sums of a layer. Ranks at one position are on one machine, a replica's on as many
    as it has, over whose cards the shared heads go: a rank's part of its layer was taken for that of the whole layer, so that
    these sums were `degree` times too small."""
    on, model = cluster(("A100-SXM4-80GB", degree, 2), gbps=25), LLAMA_8B.replace(kv_heads=heads, layers=1)
    layout = one_stage(on, *(list(range(first, on.size, 2)) for first in (0, 1)), model=model, zero=2)
    network, layer = Network(on), Portion(1, False, False)
    costs = StateCosts(layout, HETHUB, network, lambda stage, portion: (1.0, 2.0))
    pieces = [piece for bucket in StateMap(layout).buckets if bucket.decays for piece in bucket.pieces]
    for ring in costs.rings.unlike(0):
        if (group := ring.group).size > 2:
            summed = sum(piece.numel for piece in pieces if network.group(piece.group.contributors) == group)
            assert ring.part * costs.most_parameters(0, layer) == pytest.approx(summed, rel=1e-3)
            wire = 4 * summed * (group.size - 1) / group.size / network.rate(Resource("cards", 0))
            assert costs.rings.seconds(0, 4 * costs.most_parameters(0, layer)) >= wire


@pytest.mark.parametrize(("zero", "collectives"), [(1, 1), (2, 3)])
def test_new_weights_come_in_their_precision(zero: int, collectives: int) -> None:
    """In bf16, half of what their gradients took. Under ZeRO-2 layer by layer: they were priced as one collective, with one
    latency for all layers."""
    on = cluster(("A100-SXM4-80GB", 2, 1))
    layout, network, layers = one_stage(on, [0], [1], zero=zero), Network(on), Portion(3, False, False)
    shown = replace(HETHUB, overlapped_gather=False)
    costs = StateCosts(layout, shown, network, lambda stage, portion: (1.0, 2.0))
    each = network.reduce_scatter(network.group([0, 1]), 2 * LLAMA_8B.layer_parameters * 3 / collectives)
    found = costs.reduction(0, layers).gather_seconds - costs.norms_seconds(0, layers)
    assert found == pytest.approx(collectives * each, rel=1e-9)
