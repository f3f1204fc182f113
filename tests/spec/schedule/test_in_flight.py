"""How many microbatches must be in flight: the smallest number runs, one less is refused and would deadlock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hethub.spec.errors import BadInput
from hethub.spec.layout.bind import Layout
from hethub.spec.plan import PlanSpec
from hethub.spec.schedule.in_flight import in_flight_limits
from tests.oracle.execution_order import execution_order
from tests.spec.random_plans import cases
from tests.support.layouts import MODEL, Case, replica, stage


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_uniform_pipelines_default_to_the_classical_depth(num_stages: int) -> None:
    stages = [stage((s, s + 1), replica([s], 8)) for s in range(num_stages)]
    layout = Case(name="pp", stages=stages, model=MODEL.replace(layers=num_stages)).layout()
    assert layout.in_flight == [[num_stages - s] for s in range(num_stages)]


def test_equal_replicas_may_hold_unlike_numbers() -> None:
    """Where all else is even, one replica that stood for all would give both what the first asks for."""
    first = [replica([0], 4, in_flight=2), replica([1], 4, in_flight=3)]
    stages = [stage((0, 2), *first), stage((2, 4), replica([2], 4), replica([3], 4))]
    assert Case(name="unlike", stages=stages).layout().in_flight == [[2, 3], [1, 1]]


def test_a_stage_in_rounds_holds_the_smallest_number_that_a_replica_asks_for() -> None:
    first = [replica([0], 4), replica([1], 4, in_flight=4), replica([2], 4, in_flight=3)]
    stages = [stage((0, 2), *first, zero=2), stage((2, 4), *(replica([rank], 4) for rank in (3, 4, 5)), zero=2)]
    assert Case(name="rounds", stages=stages, global_batch=12).layout().actor_limits == [[3], [1]]


def minimum(plan: PlanSpec, layout: Layout, position: tuple[int, int]) -> int:
    """The smallest in_flight that is accepted for a replica, the others left to their defaults."""
    microbatches = len(layout.microbatches_of(*position))
    for value in range(1, microbatches + 1):
        try:
            in_flight_limits(with_in_flight(plan, {position: value}))
        except BadInput as refusal:
            assert f"stages[{position[0]}].replicas[{position[1]}].in_flight is {value}" in str(refusal)  # noqa: PT017
        else:
            return value
    raise AssertionError(f"no in_flight is accepted for {position}")


def with_in_flight(plan: PlanSpec, values: dict[tuple[int, int], int]) -> PlanSpec:
    stages = [
        spec.replace(
            replicas=[
                one.replace(in_flight=values.get((s, r), one.in_flight)) if (s, r) in values else one
                for r, one in enumerate(spec.replicas)
            ]
        )
        for s, spec in enumerate(plan.stages)
    ]
    return plan.replace(stages=stages)


def forced(layout: Layout, in_flight: list[list[int]]) -> Layout:
    """The layout with numbers of microbatches in flight that nobody checked."""
    unchecked = Layout(layout.plan, layout.model, layout.cluster)
    unchecked.__dict__["actor_limits"] = in_flight
    return unchecked


@given(cases(schedule="1f1b"), st.data())
def test_the_smallest_in_flight_runs_and_one_less_is_refused(case: Case, data: st.DataObject) -> None:
    layout = case.layout()
    assignments = [(s, r) for s, spec in enumerate(layout.stages) for r in range(len(spec.replicas))]
    chosen = data.draw(st.sampled_from(assignments))
    least = minimum(layout.plan, layout, chosen)
    execution_order(Layout(with_in_flight(layout.plan, {chosen: least}), layout.model, layout.cluster))
    if least > 1:
        with pytest.raises(BadInput, match=f"give at least {least},"):
            in_flight_limits(with_in_flight(layout.plan, {chosen: least - 1}))


@given(cases(schedule="1f1b"))
def test_all_replicas_at_their_smallest_run_too(case: Case) -> None:
    layout = case.layout()
    plan = layout.plan
    for s in range(layout.num_stages - 1, -1, -1):  # what a stage needs depends on those below
        for r in range(len(layout.stages[s].replicas)):
            plan = with_in_flight(plan, {(s, r): minimum(plan, layout, (s, r))})
    assert execution_order(Layout(plan, layout.model, layout.cluster))


def test_fewer_than_the_smallest_would_deadlock() -> None:
    """Two microbatches of one sample above feed one microbatch of two samples: both must be in flight at once."""
    stages = [stage((0, 2), replica([0], 4, 1)), stage((2, 4), replica([1], 4, 2))]
    layout = Case(name="wide below", stages=stages, global_batch=4).layout()
    assert minimum(layout.plan, layout, (0, 0)) == 2
    with pytest.raises(AssertionError, match="wait for each other"):
        execution_order(forced(layout, [[1], [1]]))
    with pytest.raises(
        BadInput, match=r"in_flight is 1, but a microbatch's backward waits for 2 .* remove it for the default of 4"
    ):
        in_flight_limits(with_in_flight(layout.plan, {(0, 0): 1}))


def test_a_microbatch_below_that_starts_early_pulls_its_whole_source_microbatch_up() -> None:
    """Regression: stage 2 lists [2, 4) before its first backward, and [2, 4) needs the whole of [3, 5) above it."""
    stages = [
        stage((0, 1), replica([0], 5, 2)),
        stage((1, 2), replica([1], 3, 3), replica([2], 2, 2)),
        stage((2, 3), replica([3], 5, 2)),
    ]
    layout = Case(name="early", stages=stages, global_batch=5, model=MODEL.replace(layers=3)).layout()
    execution_order(layout)
    assert minimum(layout.plan, layout, (0, 0)) == 3
