"""What every answer of the planner keeps to, on small clusters."""

from functools import cache

import pytest

from hethub.planner import plan
from hethub.planner.explain.infeasible import fewer_samples
from hethub.planner.problem.pose import pose
from hethub.planner.problem.problem import Batch, collapse
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput
from hethub.spec.job import ConstraintsSpec
from hethub.spec.layout.bind import bind
from tests.oracle.execution_order import execution_order
from tests.planner.problems import MIXED, TINY, cluster


@cache
def answer(batch):
    """The answer to the plainest question, searched once for all that is asked of it."""
    return plan(TINY, MIXED, (batch, 64, "fp32"))


def stage_islands(stage):
    return {MIXED.places[rank].island for rank in stage.ranks}


@pytest.mark.parametrize("batch", [4, 7, 16])
def test_a_plan_fits_places_every_rank_and_cannot_deadlock(batch):
    found = answer(batch)
    layout = bind(found.plan, TINY, MIXED)
    execution_order(layout)
    assert found.prediction.fits
    assert sorted([*found.plan.ranks, *found.plan.unused]) == list(range(MIXED.size))
    assert found.prediction.step_seconds >= found.lower_bound_seconds
    means = [runner.objective_seconds for runner in found.runners_up if runner.objective_seconds is not None]
    assert all(mean >= found.outlook.objective_seconds for mean in means)


def test_faster_accelerators_get_more_samples_or_layers():
    found = answer(48).plan
    work = {}
    for stage in found.stages:
        for replica in stage.replicas:
            for rank in replica.ranks:
                work[rank] = stage.num_layers * replica.samples / replica.tp
    assert min(work[2], work[3]) > 1.5 * max(work[0], work[1])


@pytest.mark.parametrize(
    ("constraints", "check"),
    [
        ({"tp": 2}, lambda p: all(r.tp == 2 for s in p.stages for r in s.replicas)),
        ({"pp": 2}, lambda p: len(p.stages) == 2),
        ({"dp": 2}, lambda p: all(len(s.replicas) == 2 for s in p.stages)),
        ({"micro_batch": 2}, lambda p: all(r.micro_batch == 2 for s in p.stages for r in s.replicas)),
        ({"max_micro_batch": 1}, lambda p: all(r.micro_batch == 1 for s in p.stages for r in s.replicas)),
        ({"recompute": "full"}, lambda p: all(s.recompute == "full" for s in p.stages)),
        ({"schedule": "gpipe"}, lambda p: p.schedule == "gpipe"),
        ({"schedule": "ministages"}, lambda p: p.schedule == "ministages" and len(p.stages[0].layers) > 1),
        ({"schedule": "layered"}, lambda p: p.schedule == "layered" and len(p.stages) == 1),
        ({"schedule": "interleaved"}, lambda p: p.schedule == "interleaved" and len(p.stages[0].layers) > 1),
        ({"zero": 3}, lambda p: all(s.zero == 3 for s in p.stages if len(s.replicas) > 1)),
        ({"zero": 0}, lambda p: all(len(stage_islands(s)) == 1 for s in p.stages)),
        ({"forbid": [("amd", "nvidia")]}, lambda p: all(len(stage_islands(s)) == 1 for s in p.stages)),
    ],
)
def test_constraints_are_kept(constraints, check):
    assert check(plan(TINY, MIXED, (8, 64, "fp32"), ConstraintsSpec(**constraints), with_bounds=False).plan)


@pytest.mark.parametrize(
    ("constraints", "words"),
    [
        ({"tp": 3}, "tp: 3 contradicts the degrees that the heads"),
        ({"pp": 7}, "pp: 7 contradicts the 6 layers"),
        ({"pp": 5}, "pp: 5 contradicts the 4 accelerators"),
        ({"dp": 17}, "dp: 17 contradicts global_batch 16"),
        ({"tp": 2, "pp": 2, "dp": 2}, "tp: 2 with pp: 2 and dp: 2 contradicts the 4 accelerators"),
        ({"pp": 3, "dp": 2}, "pp: 3 with dp: 2 contradicts the 4 accelerators"),
        ({"tp": 2, "pp": 4}, "tp: 2 with pp: 4 contradicts the 4 accelerators"),
        ({"tp": 2, "dp": 4}, "tp: 2 with dp: 4 contradicts the 4 accelerators"),
        ({"micro_batch": 4, "max_micro_batch": 2}, "micro_batch: 4 contradicts max_micro_batch: 2"),
        ({"micro_batch": 32}, "micro_batch: 32 contradicts global_batch 16"),
        ({"micro_batch": 8, "dp": 4}, "micro_batch: 8 with dp: 4 contradicts global_batch 16"),
        ({"schedule": "ministages", "pp": 4}, r"schedule: ministages with pp: 4 .* contradicts the 6 layers"),
        ({"schedule": "zero_bubble", "recompute": "full"}, "schedule: zero_bubble contradicts recompute: full"),
        ({"forbid": [("amd", "nvida")]}, "forbid names 'nvida'.*did you mean 'nvidia'"),
    ],
)
def test_contradictions_are_named_in_pairs(constraints, words):
    with pytest.raises(BadInput, match=words):
        plan(TINY, MIXED, (16, 64, "fp32"), ConstraintsSpec(**constraints))


def test_replicas_that_zero_0_keeps_on_an_island_are_told():
    with pytest.raises(BadInput, match=r"with zero: 0 all replicas of a stage lie on one maker's island"):
        plan(TINY, MIXED, (16, 64, "fp32"), ConstraintsSpec(zero=0, dp=4))
    assert plan(TINY, MIXED, (16, 64, "fp32"), ConstraintsSpec(zero=1, dp=4), with_bounds=False).prediction.fits


def test_kinds_may_be_forbidden_by_name_too():
    slow, fast = (device_type.accelerator.name for device_type in pose(TINY, MIXED, Batch(16, 64, "fp32")).device_types)
    found = plan(TINY, MIXED, (16, 64, "fp32"), ConstraintsSpec(forbid=((slow, fast),)), with_bounds=False)
    assert all(len(stage_islands(stage)) == 1 for stage in found.plan.stages)


def test_a_kind_forbidden_beside_itself_is_refused():
    with pytest.raises(ValueError, match="'amd' is forbidden beside itself"):
        ConstraintsSpec(forbid=(("amd", "amd"),))


def tight(memory_gb, node=0.05):
    return cluster(("amd", 2, node, memory_gb), ("nvidia", 2, 2 * node, memory_gb))


def test_no_plan_fits_says_by_how_much_on_what():
    with pytest.raises(BadInput, match=r"no plan fits.*2 nvidia-0\.1 by up to [\d,]+ bytes"):
        plan(TINY, tight(3.0), (16, 64, "fp32"))


def test_state_goes_to_the_hosts_where_nothing_fits_without():
    model, small = TINY.replace(layers=4, hidden=2048, ffn=5632), tight(4.7)
    found = plan(model, small, (16, 64, "fp32"), with_bounds=False)
    assert all("optimizer" in stage.offload for stage in found.plan.stages)
    assert found.prediction.fits
    bind(found.plan, model, small)


def test_a_remedy_is_verified():
    model, small, asked = TINY.replace(max_seq_len=4096), tight(4.25), (16, 4096, "fp32")
    with pytest.raises(BadInput, match=r"A plan fits with constraints\.micro_batch left free"):
        plan(model, small, asked, ConstraintsSpec(recompute="none", micro_batch=8, pp=4))
    assert plan(model, small, asked, ConstraintsSpec(recompute="none", pp=4), with_bounds=False).prediction.fits


def test_a_time_limit_ends_with_a_plan_and_says_so():
    found = plan(TINY, MIXED, (16, 64, "fp32"), ConstraintsSpec(time_limit_seconds=1e-9))
    assert found.out_of_time
    assert found.prediction.fits
    assert found.prediction.percent_of_makers_alone is None  # no bound from searches cut short


def test_when_time_is_up_no_more_partitions_are_cut(monkeypatch):
    def partitions(*_, **__):
        yield object()
        pytest.fail("another was asked for")

    monkeypatch.setattr("hethub.planner.search.auto.small.propose", partitions)
    assert plan(TINY, MIXED, (16, 64, "fp32"), ConstraintsSpec(time_limit_seconds=1e-9)).out_of_time


def test_no_smaller_batch_is_proposed_where_it_is_to_be_kept():
    problem = pose(TINY, MIXED, Batch(16, 64, "fp32"))
    assert [change.problem.batch.global_batch for change in fewer_samples(problem)] == [8, 4, 2]
    assert not list(fewer_samples(problem.with_constraints(ConstraintsSpec(keep_global_batch=True))))


def test_a_stage_over_islands_has_one_owner_for_every_byte():
    for stage in answer(48).plan.stages:
        islands = {MIXED.places[rank].island for rank in stage.ranks}
        assert len(islands) == 1 or stage.zero >= 1


def test_the_same_question_has_the_same_answer():
    one, two = answer(16), plan(TINY, MIXED, (16, 64, "fp32"))
    assert one.plan == two.plan
    assert one.candidates == two.candidates


def test_nodes_with_other_interfaces_are_of_another_kind() -> None:
    """Equal in all, also in Gbit/s of a node: one card of 400 carries one message faster than four of 100 do."""
    node = {"accelerator": "A100-SXM4-80GB", "accelerators": 4}
    nodes = [
        {**node, "name": "a", "nics": 4, "gbps_per_nic": 100},
        {**node, "name": "b", "nics": 1, "gbps_per_nic": 400},
    ]
    assert len(collapse(ClusterSpec.model_validate({"name": "two", "nodes": nodes}))) == 2
