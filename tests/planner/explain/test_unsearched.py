"""What an answer says it did not look at."""

from dataclasses import replace

from hethub.planner.explain.unsearched import not_searched
from hethub.planner.problem.capabilities import RUNTIME
from hethub.planner.problem.pose import pose
from hethub.planner.problem.problem import Batch, Problem
from tests.planner.problems import MIXED, TINY


def asked(capabilities: object = RUNTIME) -> Problem:
    return pose(TINY, MIXED, Batch(16, 64, "fp32"), capabilities=capabilities)  # type: ignore[arg-type]


def test_every_entry_has_a_key_of_its_own_and_a_text() -> None:
    entries = not_searched(asked())
    assert len({entry.key for entry in entries}) == len(entries)
    assert all(entry.text and " " not in entry.key for entry in entries)


def test_what_only_families_propose_is_told_from_what_nobody_does() -> None:
    texts = {entry.key: entry.text for entry in not_searched(asked(replace(RUNTIME, family_zero=(0, 1, 2))))}
    assert texts["zero.2"] == "ZeRO 2: only as the families of their papers propose it"
    assert texts["zero.3"] == "ZeRO 3: not searched"


def test_what_is_searched_is_not_listed() -> None:
    keys = {entry.key for entry in not_searched(asked(replace(RUNTIME, zero=(0, 1, 2, 3), offload=())))}
    assert not {"zero.2", "zero.3", "schedule.1f1b"} & keys
    assert "offload.parameters" in keys
