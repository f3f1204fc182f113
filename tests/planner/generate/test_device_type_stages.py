"""Stages of one device type each: the candidates, and the dynamic programme against all ways to put device types behind each
other."""

from itertools import permutations, product

import numpy as np
import pytest

from hethub.planner import plan
from hethub.planner.candidate.candidate import Candidate
from hethub.planner.estimate.estimator import Estimator
from hethub.planner.generate import device_type_stages
from hethub.planner.generate.device_type_stages import SubsetSearch
from hethub.planner.generate.stage_layouts import DeviceTypeLayouts, Goals
from hethub.planner.generate.table import orders, tabulate
from hethub.planner.problem.pose import pose
from hethub.planner.problem.problem import Batch, Problem
from hethub.spec.cluster import ClusterSpec
from hethub.spec.job import ConstraintsSpec
from hethub.spec.model import ModelSpec
from tests.predictor.plans import cluster

MODEL = ModelSpec(
    name="twenty",
    layers=20,
    hidden=2048,
    heads=16,
    kv_heads=8,
    ffn=5632,
    vocab=32000,
    max_seq_len=4096,
    tied_head=False,
)


THREE = cluster(("A100-SXM4-40GB", 1, 4), ("V100-SXM2-16GB", 1, 4), ("T4", 2, 4), gbps=12.5)


def posed(constraints: ConstraintsSpec | None = None, on: ClusterSpec = THREE) -> Problem:
    return pose(MODEL, on, Batch(128, 1024, "fp16"), constraints)


def candidates_of(problem: Problem) -> list[Candidate]:
    estimator = Estimator(problem)
    return device_type_stages.propose(problem, estimator, tabulate(problem, estimator.unit_costs))


def test_every_stage_holds_one_kind_and_all_units_have_a_group() -> None:
    problem = posed()
    candidates = candidates_of(problem)
    assert len(candidates) > 10
    for candidate in candidates:
        assert sum(stage.layers for stage in candidate.stages) == MODEL.layers
        assert all(len(stage.groups) == 1 and stage.layers >= 1 for stage in candidate.stages)
        order = [stage.groups[0].device_type for stage in candidate.stages]
        assert tuple(dict.fromkeys(order)) in orders(problem, range(len(problem.device_types)))
        for device_type in range(len(problem.device_types)):
            own = [
                group.number * group.tp
                for stage in candidate.stages
                for group in stage.groups
                if group.device_type == device_type
            ]
            assert sum(own) == problem.device_types[device_type].size
            assert order == sorted(order, key=order.index)  # a device type's stages stand together


@pytest.mark.parametrize("ends_at", [1.5, 2.0])
def test_the_programme_finds_the_soonest_way_through(ends_at: float) -> None:
    """Against every choice of stages and layers for every order of the device types, one goal."""
    problem = posed()
    estimator = Estimator(problem)
    bound = float(tabulate(problem, estimator.unit_costs).bound[0])
    goals = Goals(np.array([ends_at * bound]), np.array([0]), np.array([4]))
    device_types = {own: DeviceTypeLayouts(problem, estimator, own, goals) for own in range(3)}
    soonest: dict[int, float] = {}  # by number of stages
    for order in permutations(range(3)):
        if order not in orders(problem, range(3)):
            continue
        for stages in product(*(device_types[device_type].layouts for device_type in order)):
            behind = [sum(stages[i + 1 :]) for i in range(3)]
            tables = [device_types[k].table(stages[i], (i == 0, i == 2)) for i, k in enumerate(order)]
            if None in tables or sum(stages) > device_types[0].depth:
                continue
            rows = [table.seconds[0, at] for table, at in zip(tables, behind, strict=True)]
            for layers in product(*(range(len(row)) for row in rows)):
                if sum(layers) == MODEL.layers:
                    through = float(sum(row[x] for row, x in zip(rows, layers, strict=True)))
                    soonest[sum(stages)] = min(through, soonest.get(sum(stages), np.inf))
    wanted = {stages: through for stages, through in soonest.items() if np.isfinite(through)}
    found: dict[int, float] = {}
    for candidate in SubsetSearch(problem, device_types, goals).candidates():
        through = sum(
            stage.layers * estimator.unit_costs.rate(*stage.groups[0][:3], stage.recompute).layer.total
            for stage in candidate.stages
        )
        found[len(candidate.stages)] = min(through, found.get(len(candidate.stages), np.inf))
    assert wanted
    assert found == pytest.approx(wanted)


def test_stages_keep_deadline_and_memory() -> None:
    """By their own estimate: the busiest computes within 1.5 times of perfect balance, and nearly all fit."""
    problem = posed()
    estimator = Estimator(problem)
    table = tabulate(problem, estimator.unit_costs)
    bound = float(table.bound[0])
    candidates = device_type_stages.propose(problem, estimator, table)
    assert len(candidates) > 10
    assert all(estimator.least(candidate) <= 1.5 * bound * 1.001 for candidate in candidates)
    assert sum(map(estimator.likely_fits, candidates)) >= 0.8 * len(candidates)


@pytest.mark.parametrize("given", [{"pp": 5}, {"tp": 2}, {"dp": 4}, {"micro_batch": 1}, {"max_micro_batch": 2}])
def test_constraints_are_kept(given: dict[str, int]) -> None:
    candidates = candidates_of(posed(ConstraintsSpec(**given)))
    assert candidates
    for candidate in candidates:
        groups = [group for stage in candidate.stages for group in stage.groups]
        assert given.get("pp") in (None, len(candidate.stages))
        assert given.get("tp") is None or {own.tp for own in groups} == {given["tp"]}
        assert given.get("dp") is None or {own.number for own in groups} == {given["dp"]}
        assert given.get("micro_batch") is None or {own.micro_batch for own in groups} == {given["micro_batch"]}
        assert max(own.micro_batch for own in groups) <= given.get("max_micro_batch", 64)


def test_one_kind_needs_no_order() -> None:
    assert candidates_of(posed(on=cluster(("T4", 3, 2)))) == []


def test_unlike_kinds_in_stages_of_unlike_width() -> None:
    """Twelve slow accelerators beside four fast ones: equally wide stages waste either, which the plan does not."""
    found = plan(MODEL, cluster(("A100-SXM4-40GB", 1, 4), ("T4", 3, 4), gbps=12.5), Batch(128, 1024, "fp16"))
    assert found.prediction.percent_of_makers_alone is not None
    assert found.prediction.percent_of_makers_alone > 90
