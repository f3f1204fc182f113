"""What is enumerated where device types are many."""

import math

from hethub.planner.generate.table import MOST_DEGREES, degree_choices, degrees_by_device_type, micro_batch_choices
from hethub.planner.problem.pose import pose
from hethub.planner.problem.problem import Batch
from tests.oracle.question import MODEL, random_cluster


def test_where_kinds_are_many_not_every_combination_is_made() -> None:
    """Eleven device types of which each may have one of two degrees and micro-batches: a table of 786,112 rows, else."""
    problem = pose(MODEL.replace(layers=32), random_cluster(0, 16), Batch(256, 512, "bf16"))
    every = range(len(problem.device_types))
    sizes = micro_batch_choices(problem, every)
    assert all(len(set(choice)) == 1 for choice in sizes)
    assert len(degree_choices(degrees_by_device_type(problem, every))) <= MOST_DEGREES
    wide = problem.cluster.replace(nodes=tuple(node.replace(accelerators=8) for node in problem.cluster.nodes))
    many = pose(MODEL, wide, Batch(1024, 512, "bf16"))
    own = degrees_by_device_type(many, every)
    chosen = degree_choices(own)
    assert math.prod(map(len, own)) > MOST_DEGREES >= len(chosen)
    assert all(degree in some for choice in chosen for degree, some in zip(choice, own, strict=True))
    assert {(device_type, degree) for choice in chosen for device_type, degree in enumerate(choice)} == {
        (device_type, degree) for device_type, some in enumerate(own) for degree in some
    }
