"""Stages cut exactly: beside all ways to cut them."""

from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest

from hethub.planner.estimate.costs import UnitCosts
from hethub.planner.generate.cuts import best_cuts
from hethub.planner.generate.partition import DEADLINES, Partitioner
from hethub.planner.generate.small import ordered_partitions
from hethub.planner.generate.table import Line, tabulate
from hethub.planner.problem.pose import pose
from hethub.planner.problem.problem import Batch, Combination
from hethub.spec.job import ConstraintsSpec
from tests.planner.problems import TINY, cluster


def test_ordered_partitions_are_all_of_them():
    assert len(ordered_partitions((1, 1, 1, 1))) == 75  # the ordered Bell number
    assert ordered_partitions((2,)) == (((1,), (1,)), ((2,),))


def busiest(problem, costs, line, combination, layers, sizes):
    """Seconds of the slowest stage under the smallest deadline that its units' whole samples meet."""
    position, slowest = 0, 0.0
    for stage, (held, size) in enumerate(zip(layers, sizes, strict=True)):
        seconds = []
        for unit in line[position : position + size]:
            size_of = combination.micro_batches[unit.device_type]
            microbatch = costs.rate(unit.device_type, unit.tp, size_of, combination.recompute).microbatch(
                held, stage == 0, stage == len(layers) - 1
            )
            seconds.append(microbatch.total / size_of)
        ends = sorted(n * one for one in seconds for n in range(1, problem.batch.global_batch + 1))
        enough = (end for end in ends if sum(int(end / one + 1e-9) for one in seconds) >= problem.batch.global_batch)
        position, slowest = position + size, max(slowest, next(enough))
    return slowest


def cuts_of(total, parts):
    """All ways to write the total as so many positive numbers."""
    inner = combinations(range(1, total), parts - 1)
    return [tuple(b - a for a, b in pairwise((0, *edges, total))) for edges in inner]


@pytest.mark.parametrize("numbers", [(5, 0), (3, 2)])
def test_partitions_meet_the_first_deadline_that_any_of_their_depth_meets(numbers):
    nodes = [node for node in (("amd", numbers[0], 0.05, 4.0), ("nvidia", numbers[1], 0.1, 4.0)) if node[1]]
    problem = pose(TINY, cluster(*nodes), Batch(12, 64, "fp32"))
    costs, device_types = UnitCosts(problem), tuple(range(len(nodes)))
    combination = Combination((1,) * len(device_types), (2,) * len(device_types), "none")
    line = Line(device_types, 1).units(problem, combination.degrees)
    partitioner = Partitioner(problem, costs, line, combination)
    found = {len(partition.stages): partition for partition in partitioner.partitions(range(1, 6), float("inf"))}
    assert len(found) > 2
    for depth, partition in found.items():
        layers, sizes = zip(*partition.stages, strict=True)
        assert (sum(layers), sum(sizes)) == (TINY.layers, 5)
        assert busiest(problem, costs, line, combination, layers, sizes) <= partition.deadline_seconds * (1 + 1e-9)
        best = min(
            busiest(problem, costs, line, combination, held, units)
            for held, units in product(cuts_of(TINY.layers, depth), cuts_of(5, depth))
        )
        later = [step for step in DEADLINES if partitioner.bound_seconds * step >= best * (1 - 1e-9)]
        assert partition.deadline_seconds == partitioner.bound_seconds * later[0]


@pytest.mark.parametrize("stages", [2, 3, 6])
def test_cuts_into_stages_of_one_kind_are_balanced_as_well_as_any_other_layers(stages):
    nodes = cluster(("amd", 4, 0.05, 4.0), ("nvidia", 2, 0.1, 4.0))
    problem = pose(TINY.replace(layers=9), nodes, Batch(16, 64, "fp32"), ConstraintsSpec(pp=stages))
    costs = UnitCosts(problem)
    found = best_cuts(problem, replace(tabulate(problem, costs), memory_counts=False), 20).pure
    assert len(found) > 4
    for entry in found:
        combination, sizes = entry.combination, [entry.line.replicas] * stages
        units = entry.line.units(problem, combination.degrees)
        others = (busiest(problem, costs, units, combination, layers, sizes) for layers in cuts_of(9, stages))
        assert busiest(problem, costs, units, combination, entry.layers, sizes) <= min(others) * (1 + 1e-5)
