"""What of a cluster is alike, and which replicas its machines can hold."""

from itertools import combinations
from typing import Any

import pytest

from hethub.planner.problem.pose import pose
from hethub.planner.problem.problem import Batch, Problem, collapse
from hethub.spec.cluster import ClusterSpec
from hethub.spec.job import ConstraintsSpec
from tests.planner.problems import TINY, cluster

NODE = {"accelerator": "A100-SXM4-80GB", "accelerators": 4, "nics": 4, "gbps_per_nic": 100}
RACKS = {"racks": [{"name": "west", "nodes": ["a"], "gbps": 400}, {"name": "east", "nodes": ["b"], "gbps": 400}]}
REGIONS = {"regions": {"names": ["x", "y"], "of_node": {"a": "x", "b": "y"}, "gbps": [[100, 10], [10, 100]]}}


@pytest.mark.parametrize(
    ("changed", "links", "types"),
    [
        ({}, {}, 1),
        ({"accelerators": 2}, {}, 2),
        ({"reserved_memory_gb": 1}, {}, 2),
        ({"host_memory_gb": 64}, {}, 2),
        ({"gbps_per_nic": 50}, {}, 2),
        ({}, RACKS, 2),
        ({}, REGIONS, 2),
    ],
)
def test_accelerators_are_of_one_type_where_a_plan_sees_no_difference(
    changed: dict[str, Any], links: dict[str, Any], types: int
) -> None:
    nodes = [{**NODE, "name": "a"}, {**NODE, "name": "b", **changed}]
    found = collapse(ClusterSpec.model_validate({"name": "two", "nodes": nodes, "links": links}))
    assert len(found) == types
    assert sorted(rank for own in found for rank in own.ranks) == list(range(sum(own.size for own in found)))


def on_one_machine(accelerators: int, heads: int, **given: object) -> Problem:
    model = TINY.replace(hidden=16 * heads, heads=heads, kv_heads=heads)
    return pose(
        model, cluster(("amd", accelerators, 0.1, 4.0)), Batch(8, 64, "fp32"), ConstraintsSpec.model_validate(given)
    )


def test_what_a_degree_leaves_of_a_machine_forms_the_largest_groups_or_is_unused_where_it_is_given() -> None:
    assert [unit.ranks for unit in on_one_machine(7, 8).units(0, 4)] == [(0, 1, 2, 3), (4, 5), (6,)]
    assert [unit.ranks for unit in on_one_machine(7, 8, tp=4).units(0, 4)] == [(0, 1, 2, 3)]


def test_degrees_are_powers_of_two_unless_one_is_given() -> None:
    assert on_one_machine(6, 6).degrees == (1, 2, 3, 6)
    assert on_one_machine(6, 6).degrees_of(0) == [1, 2]
    assert on_one_machine(6, 6, tp=3).degrees_of(0) == [3]


def test_a_maker_forbidden_beside_one_of_its_accelerators_leaves_that_one_alone_allowed() -> None:
    on = cluster(("amd", 1, 0.1, 4.0), ("amd", 1, 0.2, 4.0), ("nvidia", 1, 0.1, 4.0))
    problem = pose(TINY, on, Batch(8, 64, "fp32"), ConstraintsSpec(forbid=(("amd", "amd-0.2"),)))
    names = [own.accelerator.name for own in problem.device_types]
    assert {frozenset(names[own] for own in pair) for pair in problem.forbidden} == {frozenset({"amd-0.1", "amd-0.2"})}


def test_of_several_forbidden_pairs_each_is_kept_apart() -> None:
    """One of them alone was: a stage held V100s and A100s, or AMD's cards beside all of NVIDIA's but one type."""
    on = cluster(("nvidia", 1, 0.1, 4.0), ("nvidia", 1, 0.2, 4.0), ("amd", 1, 0.1, 4.0))
    problem = pose(TINY, on, Batch(8, 64, "fp32"), ConstraintsSpec(forbid=(("amd", "nvidia"),)))
    names = [own.accelerator.vendor for own in problem.device_types]
    alone, mixed = [(0,), (1,), (2,)], [(0, 1), (0, 2), (1, 2)]
    for stage in alone + mixed:
        is_forbidden = len({names[own] for own in stage}) > 1
        assert problem.forbids_any(iter(own) for own in [(), stage]) == is_forbidden
    assert len(problem.forbidden) == 2


def test_stages_that_keep_their_optimizer_state_whole_lie_on_one_island() -> None:
    on = cluster(("nvidia", 1, 0.1, 4.0), ("nvidia", 1, 0.2, 4.0), ("amd", 1, 0.1, 4.0))
    whole, free = (pose(TINY, on, Batch(8, 64, "fp32"), ConstraintsSpec(zero=level)) for level in (0, None))
    islands = [own.island for own in whole.device_types]
    alike = {frozenset(own for own, island in enumerate(islands) if island == name) for name in ("nvidia", "amd")}
    assert sorted(map(len, alike)) == [1, 2]
    assert {*whole.forbidden} == {frozenset(own) for own in combinations(range(3), 2)} - alike
    assert not free.forbidden
