"""Parts of a search in processes forked from it: the same answers in the same order, and nothing left behind."""

import multiprocessing
import os
import signal

import pytest

from hethub.planner.evaluate.processes import at_once, forked
from hethub.spec.errors import BadInput

PARENT = os.getpid()


def squared(number: int) -> int:
    return number * number


@pytest.mark.parametrize("processes", [0, 1, 3, 20])
def test_results_come_in_the_order_of_their_items(processes: int) -> None:
    with forked(squared, range(10), processes) as results:
        assert results() == [number * number for number in range(10)]
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("processes", [1, 2, 8])
@pytest.mark.parametrize("worth", [1e-9, 1e9])
def test_what_is_done_at_once_comes_in_order_and_is_forked_where_that_is_worth_it(
    processes: int, worth: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hethub.planner.evaluate.processes.WORTH_FORKING", worth)
    found = at_once(lambda number: (number, os.getpid()), range(6), processes)
    assert [number for number, _ in found] == list(range(6))
    assert worth < 1 or {process for _, process in found} == {PARENT}
    assert at_once(squared, [], processes) == []


def test_processes_know_what_was_known_before_and_may_be_forked_beside_others() -> None:
    known = {"more": 3}
    with forked(lambda number: number + known["more"], [1, 2], 2) as one:
        with forked(lambda number: number * known["more"], [1, 2], 2) as other:
            assert other() == [3, 6]
        assert one() == [4, 5]


@pytest.mark.parametrize("error", [BadInput, OSError, MemoryError])
def test_what_users_are_told_comes_back_as_it_was(error: type[Exception]) -> None:
    def refuse(number: int) -> int:
        raise error(f"{number} is refused")

    with forked(refuse, [0], 1) as results:
        for process in multiprocessing.active_children():
            process.join(1.0)  # it has taken the item; where not, it is refused here
        with pytest.raises(error, match="0 is refused"):
            results()
    assert not multiprocessing.active_children()


def test_a_process_that_was_killed_is_told() -> None:
    def die(_: int) -> None:
        assert os.getpid() != PARENT
        os.kill(os.getpid(), signal.SIGKILL)

    with forked(die, [0], 1) as results:
        (process,) = multiprocessing.active_children()
        process.join()
        with pytest.raises(RuntimeError, match="ended without an answer, exit code -9"):
            results()
