"""The families' own plans: faithful to their papers, valid, executable and within memory."""

import pytest

from hethub.planner.candidate.candidate import Candidate
from hethub.planner.candidate.materialize import Replica, StageChoice, materialize, plan_of
from hethub.planner.estimate.estimator import Estimator
from hethub.planner.generate.families import FAMILIES
from hethub.planner.generate.families.uniform import units_in_order
from hethub.planner.generate.families.whole import held_alone, shared_bytes
from hethub.planner.problem.pose import pose
from hethub.planner.problem.problem import Batch, Problem
from hethub.predictor import predict
from hethub.predictor.memory.ranks import rank_memory
from hethub.predictor.memory.surroundings import PROCESS_BYTES
from hethub.spec.cluster import ClusterSpec
from hethub.spec.job import STRATEGIES, ConstraintsSpec
from hethub.spec.layout.bind import Layout, bind
from hethub.spec.layout.execution import check_executable
from hethub.spec.model import ModelSpec
from hethub.spec.plan import PlanSpec, ScheduleName
from tests.oracle.execution_order import execution_order

MODEL = ModelSpec(name="small", layers=8, hidden=256, heads=8, kv_heads=8, ffn=704, vocab=1024, max_seq_len=256)


def test_a_job_can_name_every_family() -> None:
    assert {*STRATEGIES} - {"auto", "exhaustive", "hap"} == {*FAMILIES}


def cpu(name: str, tflops: float, memory_gb: float) -> dict[str, object]:
    """A CPU with so much memory beside what a process takes, of which too a part stays free."""
    beside = memory_gb + PROCESS_BYTES / 2**30 / (1 - ConstraintsSpec().reserve)
    return {
        "name": name, "vendor": "cpu", "memory_gb": beside, "memory_gbytes_per_second": 200 * tflops,
        "fp32_tflops": tflops, "link_gbytes_per_second": 20,
    }  # fmt: skip


def problem(memories: tuple[float, float] = (1.0, 1.0), batch: int = 50, **constraints: object) -> Problem:
    """Two slow accelerators and two fast ones, of so much memory each."""
    nodes = [
        {"name": f"n{i}", "accelerator": cpu(f"cpu-{i}", rate, memory), "accelerators": 2, "host_memory_gb": 8}
        for i, (rate, memory) in enumerate(zip((0.05, 0.1), memories, strict=True))
    ]
    on = ClusterSpec.model_validate({"name": "test", "emulated": True, "nodes": nodes})
    return pose(MODEL, on, Batch(batch, 128, "fp32"), ConstraintsSpec.model_validate(constraints))


def whole_candidates(name: str, asked: Problem) -> list[Candidate]:
    """The family's candidates that carry their plan."""
    return list(FAMILIES[name].propose_whole(asked, Estimator(asked)))


def ministages(asked: Problem) -> list[PlanSpec]:
    """The plans of Zorse's candidates in chunks."""
    costs = Estimator(asked)
    made = [
        materialize(candidate, asked, costs.unit_costs.worker, None)
        for candidate in FAMILIES["zorse"].propose_whole(asked, costs)
    ]
    return [plan for plan in made if plan is not None]


def checked(asked: Problem, plan: PlanSpec) -> Layout:
    layout = bind(plan, MODEL, asked.cluster)
    check_executable(layout)
    execution_order(layout)
    return layout


@pytest.mark.parametrize("zero", [2, 3])
def test_poplar_gives_all_ranks_one_number_of_steps_and_the_faster_ones_larger_batches(zero: int) -> None:
    asked = problem(zero=zero)
    candidates = whole_candidates("poplar", asked)
    assert candidates
    for candidate in candidates:
        assert candidate.plan is not None
        layout = checked(asked, candidate.plan)
        replicas = candidate.plan.stages[0].replicas
        steps = [len(layout.microbatches_of(0, r)) for r in range(len(replicas))]
        assert max(steps) - min(steps) <= 1  # the last step takes what is left
        assert replicas[2].micro_batch > replicas[0].micro_batch
        assert candidate.plan.stages[0].zero == zero
        assert predict(layout).fits


def test_cephalo_divides_state_by_memory_and_samples_by_speed() -> None:
    asked = problem(memories=(0.055, 0.3), recompute="full")
    candidates = whole_candidates("cephalo", asked)
    assert candidates
    for candidate in candidates:
        assert candidate.plan is not None
        stage = candidate.plan.stages[0]
        assert (candidate.plan.schedule, stage.zero) == ("layered", 3)
        assert stage.state_shares[0] < stage.state_shares[3]
        assert stage.replicas[3].samples > stage.replicas[0].samples
        assert predict(checked(asked, candidate.plan)).fits


def test_zorse_cuts_stages_into_ministages_and_offloads_only_where_memory_asks_for_it() -> None:
    extra_in_flight, tight = problem(), problem(memories=(0.085, 0.085), recompute="full")
    found = [ministages(asked) for asked in (extra_in_flight, tight)]
    for asked, plans in zip((extra_in_flight, tight), found, strict=True):
        assert plans
        for plan in plans:
            assert plan.schedule == "ministages"
            assert plan.num_chunks > 1
            assert predict(checked(asked, plan)).fits
    assert not any(stage.offload for plan in found[0] for stage in plan.stages)
    assert any(stage.offload for plan in found[1] for stage in plan.stages)


def test_ministages_keep_to_a_given_micro_batch() -> None:
    """By speed alone the slow replicas had fewer samples than it, and every plan was refused."""
    plans = ministages(problem(batch=16, micro_batch=4))
    assert plans
    assert all(r.micro_batch == 4 for plan in plans for stage in plan.stages for r in stage.replicas)


@pytest.mark.parametrize(("schedule", "zero"), [("layered", 3), ("1f1b", 3), ("1f1b", 2)])
@pytest.mark.parametrize("tied_head", [False, True])
@pytest.mark.parametrize("slow", [cpu("cpu-0", 0.05, 1.0), "T4"])
def test_memory_of_a_whole_plan_is_read_off_a_few_ranks(
    schedule: ScheduleName, zero: int, tied_head: bool, slow: object
) -> None:
    """Of two devices beside CPUs one was asked, which alone on its island would have no communicators."""
    nodes = [
        {"name": name, "accelerator": own, "accelerators": 2}
        for name, own in (("n0", slow), ("n1", cpu("b", 0.1, 1.0)))
    ]
    on = ClusterSpec.model_validate({"name": "test", "emulated": True, "nodes": nodes})
    model = MODEL.replace(tied_head=tied_head, name="maybe-tied")
    asked = pose(model, on, Batch(36, 128, "fp32"))
    replicas = [Replica(unit, 2 + unit.device_type, 6 + 6 * unit.device_type) for unit in units_in_order(asked, 1)]
    stage = StageChoice(replicas, zero, "full")
    used = rank_memory(Layout(plan_of(asked, schedule, [model.layers], [stage]), model, asked.cluster))
    for held, entry in zip(held_alone(asked, schedule, stage), used, strict=True):
        part = shared_bytes(asked, zero) / asked.size
        assert held.alone + part == pytest.approx(entry.bytes, abs=64)  # parts are whole bytes


def test_zorse_parts_regions_before_it_parts_machines() -> None:
    rates = {"a": 0.05, "b": 0.1, "c": 0.05, "d": 0.1}
    nodes = [
        {"name": name, "accelerator": cpu(f"cpu-{name}", rate, 1.0), "count": 2, "accelerators": 2, "gbps_per_nic": 20}
        for name, rate in rates.items()
    ]
    of_node = {"a": "east", "b": "east", "c": "west", "d": "west"}
    regions = {"names": ["east", "west"], "of_node": of_node, "gbps": [[100, 5], [5, 100]]}
    on = ClusterSpec.model_validate({"name": "far", "emulated": True, "nodes": nodes, "links": {"regions": regions}})
    asked = pose(MODEL, on, Batch(50, 128, "fp32"))
    candidates = list(FAMILIES["zorse"].propose(asked, Estimator(asked)))
    pairs = [candidate for candidate in candidates if len(candidate.stages) == 2]
    assert pairs
    for candidate in pairs:
        assert sorted(sorted(own.device_type for own in stage.groups) for stage in candidate.stages) == [[0, 1], [2, 3]]
    assert max(len(candidate.stages) for candidate in candidates) == 8


def test_zorse_keeps_to_the_given_replicas_in_every_group() -> None:
    """Only the first group was asked, and what others broke took the places of plans that keep to it."""
    nodes = [
        {"name": name, "accelerator": cpu(f"cpu-{name}", 0.05, 1.0), "accelerators": size, "gbps_per_nic": 5}
        for name, size in (("a", 4), ("b", 2), ("c", 2))
    ]
    of_node = {"a": "east", "b": "west", "c": "west"}
    regions = {"names": ["east", "west"], "of_node": of_node, "gbps": [[100, 1], [1, 100]]}
    on = ClusterSpec.model_validate({"name": "unlike", "emulated": True, "nodes": nodes, "links": {"regions": regions}})
    asked = pose(MODEL, on, Batch(48, 128, "fp32"), ConstraintsSpec(dp=4))
    found = list(FAMILIES["zorse"].propose(asked, Estimator(asked)))
    sizes = {tuple(sum(group.number for group in stage.groups) for stage in candidate.stages) for candidate in found}
    assert sizes == {(4, 4)}
