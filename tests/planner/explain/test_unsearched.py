"""What an answer says it did not look at."""

from typing import get_args

from hethub.planner.explain.unsearched import NOT_SEARCHED
from hethub.planner.problem.problem import RUNTIME
from hethub.spec.plan import Offload, ScheduleName


def test_every_entry_has_a_key_of_its_own_and_a_text() -> None:
    assert len({entry.key for entry in NOT_SEARCHED}) == len(NOT_SEARCHED)
    assert all(entry.text and " " not in entry.key for entry in NOT_SEARCHED)


def test_every_schedule_level_and_offload_is_searched() -> None:
    """What is not would have to be listed, and refused as a constraint."""
    assert {*RUNTIME.schedules} == {*get_args(ScheduleName)}
    assert {*RUNTIME.zero} == {0, 1, 2, 3}
    assert {*RUNTIME.offload} == {*get_args(Offload)}
