"""What an answer says it did not look at."""

from dataclasses import replace

from hethub.planner.explain.unsearched import not_searched
from hethub.planner.problem.pose import pose
from hethub.planner.problem.problem import RUNTIME, Batch, Capabilities, Problem
from tests.planner.problems import MIXED, TINY


def asked(capabilities: Capabilities = RUNTIME) -> Problem:
    return replace(pose(TINY, MIXED, Batch(16, 64, "fp32")), capabilities=capabilities)


def test_every_entry_has_a_key_of_its_own_and_a_text() -> None:
    entries = not_searched(asked())
    assert len({entry.key for entry in entries}) == len(entries)
    assert all(entry.text and " " not in entry.key for entry in entries)


def test_what_capabilities_leave_out_is_listed() -> None:
    keys = {
        entry.key for entry in not_searched(asked(replace(RUNTIME, zero=(0, 1, 2), schedules=("1f1b",), offload=())))
    }
    assert {"zero.3", "schedule.layered", "offload.parameters"} <= keys
    assert not {"zero.2", "schedule.1f1b"} & keys


def test_every_schedule_level_and_offload_is_searched() -> None:
    assert not [entry for entry in not_searched(asked()) if entry.key.startswith(("schedule.", "zero.", "offload."))]
