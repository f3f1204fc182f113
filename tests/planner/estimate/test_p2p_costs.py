"""Seconds between stages before ranks are named, beside the predictor's once they are."""

import pytest

from hethub.planner.candidate.candidate import Candidate, CandidateStage, ReplicaGroup
from hethub.planner.problem.pose import pose
from hethub.planner.problem.problem import Batch
from hethub.predictor.cost.constants import packaged
from hethub.predictor.cost.software import HETHUB
from hethub.predictor.pipeline.costs import PlanCosts
from hethub.spec.cluster import ClusterSpec
from hethub.spec.layout.bind import bind
from tests.planner.problems import TINY, incumbent_of

NODE = {"accelerator": "A100-SXM4-80GB", "accelerators": 4, "nics": 2, "gbps_per_nic": 100}
OTHER = {**NODE, "name": "b", "accelerator": "MI250X-GCD"}
THREE = ClusterSpec.model_validate({"name": "three", "nodes": [{**NODE, "name": "a", "count": 2}, OTHER]})


@pytest.mark.parametrize(
    "groups",
    [
        [(0, 1, 2, 1), (0, 1, 2, 1)],  # on one machine
        [(0, 1, 2, 2), (0, 1, 2, 2)],
        [(0, 1, 2, 4), (0, 1, 2, 4)],  # on two of one device type, all replicas at once
        [(0, 1, 2, 2), (0, 1, 2, 2), (0, 1, 2, 2), (0, 1, 2, 2)],  # within, over to the next, within
        [(0, 1, 4, 1), (1, 1, 2, 1), (0, 1, 2, 1)],  # the smaller microbatch goes over
        [(0, 2, 2, 2), (1, 1, 2, 4)],
        [(0, 1, 4, 8), (1, 2, 4, 2)],
        [(0, 2, 4, 1), (1, 4, 4, 1)],  # both tell their other ranks, at once
    ],
)
def test_a_microbatch_takes_as_long_between_stages_as_is_predicted(groups: list[tuple[int, int, int, int]]) -> None:
    incumbent = incumbent_of(pose(TINY, THREE, Batch(48, 64, "bf16")))
    layers = TINY.layers // len(groups)
    stages = [CandidateStage(layers, (ReplicaGroup(*own),)) for own in groups]
    more = TINY.layers - layers * len(groups)
    stages[-1] = CandidateStage(layers + more, stages[-1].groups)
    candidate = Candidate(tuple(stages))
    found = incumbent.consider(candidate)
    assert found is not None
    costs, replicas = PlanCosts(bind(found.plan, TINY, THREE), HETHUB, packaged()), candidate.replica_counts
    for above, seconds in enumerate(incumbent.costs.unit_costs.p2p_seconds(candidate)):
        samples = min(groups[above][2], groups[above + 1][2])
        slowest = max(
            costs.boundary(above, a, b, samples) for a in range(replicas[above]) for b in range(replicas[above + 1])
        )
        assert seconds == pytest.approx(slowest, rel=1e-9)
