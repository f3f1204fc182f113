"""What of an accelerator's memory a plan may use."""

from hethub.planner.problem.pose import pose
from hethub.planner.problem.problem import Batch
from hethub.spec.program import memory_limits
from tests.predictor.plans import TINY, cluster


def test_plans_of_layers_and_of_operators_may_use_as_much_of_what_others_leave() -> None:
    """Programs kept a part of all memory free, and then left the others theirs."""
    (node,) = (whole := cluster(("A100-SXM4-80GB", 1, 2))).nodes
    shared = whole.replace(nodes=(node.replace(reserved_memory_gb=30.0),))
    problem = pose(TINY, shared, Batch(4, 64, "bf16"))
    assert memory_limits(shared, problem.constraints.reserve) == [int(problem.capacity(0))] * 2
