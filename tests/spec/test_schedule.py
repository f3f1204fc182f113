"""Schedules of random plans: complete, in order, and free of deadlock by simulated execution."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hethub.spec.errors import BadInput
from hethub.spec.layout import Layout
from hethub.spec.schedule import Kind, actions, dependencies, execution_order, schedule
from tests.spec.random_plans import cases
from tests.spec.test_tiling import minimum, with_in_flight
from tests.support.layouts import MODEL, Case, replica, stage

PIPELINE = [stage((0, 2), replica([0], 8, 2)), stage((2, 4), replica([1], 8, 2))]


@given(cases(max_batch=20))
def test_every_plan_has_an_execution_order(case: Case) -> None:
    layout = case.layout()
    order = execution_order(layout)
    done = set()
    for s, r, action in order:
        assert (action.stage, action.tile.replica) == (s, r)
        assert done.issuperset(dependencies(layout, action))
        if action.kind is Kind.BACKWARD:
            assert (Kind.FORWARD, action.tile) in {(other.kind, other.tile) for other in done}
        done.add(action)
    assert len(order) == len(done) == 2 * sum(map(len, layout.tiles))


@given(cases(max_batch=20))
def test_every_tile_runs_forward_once_and_backward_once(case: Case) -> None:
    layout = case.layout()
    for (s, r), acts in schedule(layout).items():
        tiles = layout.tiles_of(s, r)
        assert [a.tile for a in acts if a.kind is Kind.FORWARD] == list(tiles)
        assert [a.tile for a in acts if a.kind is Kind.BACKWARD] == list(tiles)
        assert [a.kind for a in acts if a.tile is None] == [Kind.REDUCE, Kind.STEP, Kind.GATHER]
        assert all(a.tile is None for a in acts[2 * len(tiles) :])


@given(cases(max_batch=20))
def test_a_replica_never_holds_more_tiles_than_in_flight(case: Case) -> None:
    layout = case.layout()
    for (s, r), acts in schedule(layout).items():
        held, most = set(), 0
        for action in acts:
            if action.kind is Kind.FORWARD:
                held.add(action.tile)
            elif action.kind is Kind.BACKWARD:
                held.remove(action.tile)
            most = max(most, len(held))
        assert most == layout.in_flight[s][r] <= len(layout.tiles_of(s, r))
        if case.schedule == "gpipe":
            assert most == len(layout.tiles_of(s, r))


@given(cases(schedule="1f1b"), st.data())
def test_any_in_flight_from_the_smallest_up_runs(case: Case, data: st.DataObject) -> None:
    layout = case.layout()
    plan = layout.plan
    for s in range(layout.num_stages - 1, -1, -1):  # what a stage needs depends on those below
        for r in range(len(layout.stages[s].replicas)):
            more = data.draw(st.sampled_from([0, 0, 1, 3]))
            plan = with_in_flight(plan, {(s, r): minimum(plan, layout, (s, r)) + more})
    assert execution_order(Layout(plan, layout.model, layout.cluster))


def test_the_classical_order_of_two_stages() -> None:
    layout = Case(name="pp2", stages=PIPELINE).layout()
    first = [a.name for a in actions(layout, 0, 0)]
    assert first == [
        "forward s0 [0, 2)", "forward s0 [2, 4)", "backward s0 [0, 2)", "forward s0 [4, 6)", "backward s0 [2, 4)",
        "forward s0 [6, 8)", "backward s0 [4, 6)", "backward s0 [6, 8)", "reduce s0", "step s0", "gather s0",
    ]  # fmt: skip
    second = [a.name.split()[0] for a in actions(layout, 1, 0)]
    assert second == ["forward", "backward"] * 4 + ["reduce", "step", "gather"]


@pytest.mark.parametrize("name", ["interleaved", "ministages", "layered", "zero_bubble"])
def test_a_schedule_that_cannot_be_executed_is_refused_by_name(name: str) -> None:
    layout = Case(name=name, stages=PIPELINE, schedule=name).layout()
    with pytest.raises(BadInput, match=f"schedule '{name}' cannot be executed by this version; use one of gpipe, 1f1b"):
        actions(layout, 0, 0)


def test_too_few_in_flight_is_refused_when_the_plan_is_bound() -> None:
    stages = [stage((0, 2), replica([0], 8, 1, in_flight=1)), stage((2, 4), replica([1], 8, 2))]
    with pytest.raises(BadInput, match=r"stages\[0\]\.replicas\[0\]\.in_flight is 1.*give at least 2"):
        Case(name="small", stages=stages).layout()


def test_in_flight_has_no_meaning_under_gpipe() -> None:
    stages = [stage((0, 4), replica([0], 8, 1, in_flight=3))]
    with pytest.raises(BadInput, match="schedule gpipe holds all tiles at once, so in_flight has no meaning"):
        Case(name="gpipe", stages=stages, schedule="gpipe", model=MODEL).layout()
