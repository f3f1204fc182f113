"""What a plan's messages take of every rank's own staging, where replicas of one number seem alike and are not."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from hethub.predictor.cost.constants import packaged
from hethub.predictor.cost.resources import IN, OUT, Resource
from hethub.predictor.cost.software import HETHUB
from hethub.predictor.pipeline.costs import PlanCosts
from hethub.predictor.pipeline.traffic.link_loads import LinkLoads
from hethub.predictor.pipeline.traffic.routes import Routes
from hethub.spec.cluster import ClusterSpec
from hethub.spec.layout.bind import bind
from hethub.spec.plan import PlanSpec, ScheduleName
from tests.predictor.plans import TINY, under

SAMPLE_BYTES = 256 * 64 * 2  # tokens x hidden x bf16
STAGING = 0.1e9  # bytes a second


def loads(
    nodes: Sequence[tuple[str, int]],
    stages: Sequence[Sequence[tuple[int, int]]],
    schedule: ScheduleName = "1f1b",
    chunks: int = 1,
    *,
    per_node: bool = True,
) -> LinkLoads:
    """What stages of replicas of one rank each, given by rank and samples, send on nodes of so many accelerators: of as many
    machines of one node, where they are not apart `per_node`."""
    each = [(name, size, 1) for name, size in nodes] if per_node else [(*nodes[0], len(nodes))]
    cluster = ClusterSpec.model_validate(
        {
            "name": "ways",
            "nodes": [
                {
                    "name": f"n{i}",
                    "accelerator": name,
                    "accelerators": size,
                    "nics": 8,
                    "gbps_per_nic": 400,
                    "count": count,
                }
                for i, (name, size, count) in enumerate(each)
            ],
            "links": {"staging": {"gbytes_per_second": STAGING / 1e9}},
        }
    )
    used = {rank for own in stages for rank, _ in own}
    cuts = [TINY.layers * stage // len(stages) for stage in range(len(stages) + 1)]
    plan = {
        "model": TINY.name, "cluster": "ways", "global_batch": sum(samples for _, samples in stages[0]),
        "seq_len": 256, "precision": "bf16", "unused": [rank for rank in range(cluster.size) if rank not in used],
        "stages": [
            {
                "layers": [[cuts[stage], cuts[stage + 1]]], "zero": 1,
                "replicas": [{"ranks": [rank], "micro_batch": 4, "samples": samples} for rank, samples in own],
            }
            for stage, own in enumerate(stages)
        ],
    }  # fmt: skip
    spec = PlanSpec.model_validate(plan)
    spec = under(schedule, spec, chunks) if chunks > 1 else spec.replace(schedule=schedule)
    return PlanCosts(bind(spec, TINY, cluster), HETHUB, packaged()).loads


def test_a_replica_with_several_partners_stages_for_all_of_them() -> None:
    """Of three replicas with 4, 4 and 8 samples over three with 4, 8 and 4 each passes all of its own. The second ones, with
    a third partner each, were taken for the first ones, whose only partner has the number of theirs."""
    samples = (4, 4, 8, 4, 8, 4)
    own = list(enumerate(samples))
    found = loads([("A100-SXM4-80GB", 3), ("MI250X-GCD", 3)], [own[:3], own[3:]])
    staged = {on: seconds for on, seconds in found.both_ways.items() if on.kind == "staging"}
    assert staged == pytest.approx(
        {
            Resource("staging", rank, way): each * SAMPLE_BYTES / STAGING
            for rank, each in enumerate(samples)
            for way in (OUT, IN)
        }
    )
    assert found.longest[0] == pytest.approx(8 * SAMPLE_BYTES / STAGING)


def test_chains_that_part_further_on_are_not_alike_before() -> None:
    """Two replicas of the first two stages share their machines, those of the third do not: the second one in the middle, too,
    receives both its activations and its gradients through its staging."""
    nodes = [("A100-SXM4-80GB", 2), ("MI250X-GCD", 2), ("A100-SXM4-80GB", 1), ("A100-SXM4-80GB", 1)]
    found = loads(nodes, [[(0, 8), (1, 8)], [(2, 8), (3, 8)], [(4, 8), (5, 8)]])
    for rank in (2, 3):
        assert found.both_ways[Resource("staging", rank, IN)] == pytest.approx(2 * 8 * SAMPLE_BYTES / STAGING)
        assert found.both_ways[Resource("staging", rank, OUT)] == pytest.approx(2 * 8 * SAMPLE_BYTES / STAGING)


TWO = [("A100-SXM4-80GB", 2), ("MI250X-GCD", 2)]
SECONDS = SAMPLE_BYTES / STAGING  # of one sample through staging


@pytest.mark.parametrize(("schedule", "times"), [("1f1b", 2), ("gpipe", 1), ("layered", 1), ("ministages", 1)])
def test_the_two_ways_meet_where_microbatches_turn_one_by_one(schedule: ScheduleName, times: int) -> None:
    """Into the rank of the middle stage go activations and gradients: under 1F1B at one time."""
    nodes = [("A100-SXM4-80GB", 1), ("MI250X-GCD", 1), ("A100-SXM4-80GB", 1)]
    found = loads(nodes, [[(0, 8)], [(1, 8)], [(2, 8)]], schedule)
    down, _ = found.routes.flows[0, 0, 0]
    assert found.paces(down) == pytest.approx((SECONDS, times * SECONDS))


def test_a_flow_is_no_faster_than_its_one_card() -> None:
    """All eight cards of a machine carry more than a message after the other."""
    found = loads([("A100-SXM4-80GB", 1), ("A100-SXM4-80GB", 1)], [[(0, 8)], [(1, 8)]])
    card = 400e9 / 8 * packaged().links["between_nodes_fraction"]
    for flow in found.routes.flows[0, 0, 0]:
        assert found.paces(flow) == pytest.approx((SAMPLE_BYTES / card, SAMPLE_BYTES / card))


def test_chunks_that_take_turns_are_one_flow() -> None:
    """Two stages of two chunks: 8 samples go down twice and back up once, and their gradients the other way, so that out of the
    first stage's rank go 16 activations and 8 gradients, all to the same replica."""
    found = loads([("A100-SXM4-80GB", 1), ("MI250X-GCD", 1)], [[(0, 8)], [(1, 8)]], "interleaved", 2)
    for flow in (found.routes.flows[0, 0, 0][0], found.routes.flows[2, 0, 0][0]):
        assert (flow.in_phase, flow.in_all) == (16, 24)
        assert found.paces(flow) == pytest.approx((SECONDS, SECONDS))
    assert found.both_ways[Resource("staging", 0, OUT)] == pytest.approx(24 * SECONDS)


def test_chunk_by_chunk_a_phase_is_of_who_sends() -> None:
    """Of the boundary back to the first stage the gradients come from its second chunk, the activations from the chunk above."""
    found = loads([("A100-SXM4-80GB", 1), ("MI250X-GCD", 1)], [[(0, 8)], [(1, 8)]], "ministages", 2)
    first = {phase for phase, on in found.messages if on == Resource("staging", 0, OUT)}
    second = {phase for phase, on in found.messages if on == Resource("staging", 1, OUT)}
    assert first == {(0, 0), (0, 1), (1, 1)}
    assert second == {(0, 0), (1, 0), (1, 1)}


def test_one_chain_stands_for_all_that_are_as_busy() -> None:
    """Two chains alike: cards carry both, the staging of the first its own alone. Chains of unlike samples are two."""
    found = loads(TWO, [[(0, 8), (1, 8)], [(2, 8), (3, 8)]])
    assert found.routes.alike[0, 1, 1] == (0, 0, 0)
    assert found.both_ways[Resource("staging", 0, OUT)] == pytest.approx(8 * SECONDS)
    cards = found.network.rate(Resource("cards", 0, OUT))
    assert found.both_ways[Resource("cards", 0, OUT)] == pytest.approx(16 * SAMPLE_BYTES / cards)
    unlike = loads(TWO, [[(0, 8), (1, 12)], [(2, 8), (3, 12)]]).routes
    assert unlike.alike[0, 1, 1] == (0, 1, 1)


@pytest.mark.parametrize(
    ("device", "stages", "ways"),
    [
        ("A100-SXM4-80GB", [[0, 1], [2, 3]], [(0, 2), (1, 3)]),  # inside a machine of three, and to the next one
        ("A100-SXM4-80GB", [[0, 1], [3, 4]], [(0, 3), (0, 3)]),  # both to the next one
    ],
)
def test_ways_alike_are_those_between_machines_of_one_kind(
    device: str, stages: list[list[int]], ways: list[tuple[int, int]]
) -> None:
    samples = (4, 8)  # unlike, so that none stands for the other
    found = loads([(device, 3), (device, 3)], [list(zip(own, samples, strict=True)) for own in stages], per_node=False)
    assert [found.routes.flows[0, replica, replica][0].ranks for replica in (0, 1)] == ways


def test_what_interleaving_software_repeats_is_carried_as_often() -> None:
    found = loads(TWO, [[(0, 8)], [(2, 8)]]).routes
    repeated = Routes(found.layout, found.network, SAMPLE_BYTES, replace(HETHUB, interleave=3))
    assert [flow.in_phase for flow in repeated.flows[0, 0, 0]] == [24, 24]
    assert [flow.in_phase for flow in found.flows[0, 0, 0]] == [8, 8]


@pytest.mark.parametrize(
    ("tp", "micro_batch", "samples", "part", "turns"),
    [(1, 2, 8, 1.0, 1), (2, 2, 8, 1 / 2, 2), (2, 2, 6, 2 / 3, 2), (2, 4, 6, 4 / 6, 2), (2, 2, 5, 3 / 5, 2), (2, 8, 8, 1.0, 1)],
)  # fmt: skip
def test_the_ranks_of_a_replica_take_turns(tp: int, micro_batch: int, samples: int, part: float, turns: int) -> None:
    """As the runtime's do (`Layout.leader`); all was counted for the first, and each message behind the one before."""
    nodes = [{"name": a, "accelerator": a, "accelerators": tp} for a in ("A100-SXM4-80GB", "MI250X-GCD")]
    links = {"staging": {"gbytes_per_second": STAGING / 1e9}, "between_islands": {"gbps_per_node": 10000}}
    cluster = ClusterSpec.model_validate({"name": "turns", "nodes": nodes, "links": links})
    stages = [
        {
            "layers": [[at, at + 1]],
            "replicas": [{"ranks": [*range(at * tp, at * tp + tp)], "micro_batch": micro_batch, "samples": samples}],
        }
        for at in (0, 1)
    ]
    model = TINY.replace(layers=2)
    plan = {
        "model": TINY.name,
        "cluster": "turns",
        "global_batch": samples,
        "seq_len": 256,
        "precision": "bf16",
        "stages": stages,
    }
    layout = bind(PlanSpec.model_validate(plan), model, cluster)
    busiest = [microbatch for microbatch in layout.microbatches_of(0, 0) if layout.leader(microbatch) == 0]
    assert sum(microbatch.samples.size for microbatch in busiest) == pytest.approx(part * samples)
    for software, its_part, its_turns in ((HETHUB, part, turns), (replace(HETHUB, stack="another"), 1.0, 1)):
        found = PlanCosts(layout, software, packaged()).loads
        seconds = samples * SAMPLE_BYTES / STAGING
        assert found.both_ways[Resource("staging", 0, OUT)] == pytest.approx(its_part * seconds)
        (flow,) = [forward for forward, _ in found.routes.flows.values()]
        assert found.paces(flow)[0] == pytest.approx(max(its_part, 1 / its_turns) * SAMPLE_BYTES / STAGING)


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2), ("ministages", 2)])
def test_what_a_flow_carries_is_counted_boundary_by_boundary(schedule: ScheduleName, chunks: int) -> None:
    """Over each boundary go the samples that its two replicas share, forward from the one and back from the other."""
    nodes = [("A100-SXM4-80GB", 3), ("MI250X-GCD", 2)]
    found = loads(nodes, [[(0, 4), (1, 8), (2, 4)], [(3, 8), (4, 8)]], schedule, chunks).routes
    for (boundary, *replicas), flows in found.flows.items():
        ends = tuple(zip(found.stages[boundary], replicas, strict=True))
        for way, flow in enumerate(flows):
            sent = {None: 0, found._phase(boundary, way): 0}
            for (other, *others), samples in found.samples.items():
                there = tuple(zip(found.stages[other], others, strict=True))
                for back, between in enumerate((there, there[::-1])):
                    if between == (ends[::-1] if way else ends):
                        for phase in sent.keys() & {None, found._phase(other, back)}:
                            sent[phase] += samples
            assert [flow.in_phase, flow.in_all] == [sent[found._phase(boundary, way)], sent[None]]
