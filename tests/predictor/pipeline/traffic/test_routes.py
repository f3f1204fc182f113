"""What a plan's messages take of every rank's own staging, where replicas of one number seem alike and are not."""

from collections.abc import Sequence

import pytest

from hethub.predictor.cost.constants import packaged
from hethub.predictor.cost.resources import IN, OUT, Resource
from hethub.predictor.cost.software import HETHUB
from hethub.predictor.pipeline.costs import PlanCosts
from hethub.predictor.pipeline.traffic.link_loads import LinkLoads
from hethub.spec.cluster import ClusterSpec
from hethub.spec.layout.bind import bind
from hethub.spec.plan import PlanSpec
from tests.predictor.plans import TINY

SAMPLE_BYTES = 256 * 64 * 2  # tokens x hidden x bf16
STAGING = 0.1e9  # bytes a second


def loads(nodes: Sequence[tuple[str, int]], stages: Sequence[Sequence[tuple[int, int]]]) -> LinkLoads:
    """What stages of replicas of one rank each, given by rank and samples, send on nodes of so many accelerators."""
    cluster = ClusterSpec.model_validate(
        {
            "name": "ways",
            "nodes": [
                {"name": f"n{i}", "accelerator": name, "accelerators": size, "nics": 8, "gbps_per_nic": 400}
                for i, (name, size) in enumerate(nodes)
            ],
            "links": {"staging": {"gbytes_per_second": STAGING / 1e9}},
        }
    )
    cuts = [TINY.layers * stage // len(stages) for stage in range(len(stages) + 1)]
    plan = {
        "model": TINY.name, "cluster": "ways", "global_batch": sum(samples for _, samples in stages[0]),
        "seq_len": 256, "precision": "bf16",
        "stages": [
            {
                "layers": [[cuts[stage], cuts[stage + 1]]], "zero": 1,
                "replicas": [{"ranks": [rank], "micro_batch": 4, "samples": samples} for rank, samples in own],
            }
            for stage, own in enumerate(stages)
        ],
    }  # fmt: skip
    return PlanCosts(bind(PlanSpec.model_validate(plan), TINY, cluster), HETHUB, packaged()).loads


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
