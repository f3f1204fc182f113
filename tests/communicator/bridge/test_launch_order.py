"""Turns of launches and starts of messages, one behind the other in whatever threads they run."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from hethub.communicator.bridge.launch_order import Dispatcher, StartOrder
from hethub.kernels.device import choose_device

A_WHILE = 0.2  # seconds in which a thread that does not wait has long ended


def begun(run: Any) -> threading.Thread:
    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_result_is_waited_for_until_its_turn_has_come() -> None:
    dispatcher, results = Dispatcher(choose_device(0, 1, kind="cpu")), []
    before = dispatcher.take_turn()
    launched = dispatcher.take_turn_of(lambda: [7, 8])
    launched.begin()
    asking = begun(lambda: results.extend(launched.results()))
    asking.join(A_WHILE)
    assert asking.is_alive()
    before.leave()
    asking.join()
    assert results == [7, 8]


def test_who_waits_for_its_turn_goes_on_when_the_one_before_is_left() -> None:
    dispatcher = Dispatcher(choose_device(0, 1, kind="cpu"))
    before, turn = dispatcher.take_turn(), dispatcher.take_turn()
    waiting = threading.Thread(target=turn.__enter__, daemon=True)
    waiting.start()
    waiting.join(A_WHILE)
    assert waiting.is_alive()
    before.leave()
    waiting.join(20)
    assert not waiting.is_alive()


def test_each_chunk_is_there_as_soon_as_it_is_launched() -> None:
    dispatcher, may_go_on, results = Dispatcher(choose_device(0, 1, kind="cpu")), threading.Event(), []

    def launch() -> Iterator[str]:
        yield "first chunk"
        may_go_on.wait()
        yield "second chunk"
        raise RuntimeError("no third")

    launched = dispatcher.take_turn_of(launch)
    launching = begun(launched.begin)
    asked = launched.results()
    results.append(next(asked))
    assert launching.is_alive()
    may_go_on.set()
    results.append(next(asked))
    with pytest.raises(RuntimeError, match="no third"):
        next(asked)
    launching.join()
    assert results == ["first chunk", "second chunk"]
    with dispatcher.take_turn():
        results.append("the next turn has come")
    assert len(results) == 3


def test_a_turn_that_was_taken_in_vain_holds_nobody_up() -> None:
    dispatcher, launched = Dispatcher(choose_device(0, 1, kind="cpu")), []
    turn = dispatcher.take_turn()
    turn.drop()
    turn.leave()  # as who has it in a `with` does, too
    dropped = dispatcher.take_turn_of(lambda: launched.append("dropped") or [])
    dropped.drop()
    with dispatcher.take_turn():
        launched.append("the next turn has come")
    assert launched == ["the next turn has come"]


def cut_short() -> list[Any]:
    raise KeyboardInterrupt


def test_a_launch_that_ctrl_c_has_cut_short_is_an_error_of_its_operation_and_holds_nobody_up() -> None:
    dispatcher = Dispatcher(choose_device(0, 1, kind="cpu"))
    launched, after = dispatcher.take_turn_of(cut_short), dispatcher.take_turn()
    with pytest.raises(KeyboardInterrupt):
        launched.begin()
    said: list[str] = []

    def ask() -> None:
        try:
            list(launched.results())
        except RuntimeError as error:  # no KeyboardInterrupt, which would end the group's thread
            said.append(str(error))

    for run in (ask, after.__enter__):
        waiting = threading.Thread(target=run, daemon=True)
        waiting.start()
        waiting.join(20)
        assert not waiting.is_alive()
    assert said == ["KeyboardInterrupt while it was launched"]


def test_who_is_cut_short_by_ctrl_c_while_it_waits_for_its_turn_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dispatcher = Dispatcher(choose_device(0, 1, kind="cpu"))
    waiting, after = dispatcher.take_turn(), dispatcher.take_turn()
    with monkeypatch.context() as patch:
        patch.setattr(dispatcher, "_wait_for", lambda _: cut_short())
        with pytest.raises(KeyboardInterrupt):
            waiting.__enter__()
    entering = threading.Thread(target=after.__enter__, daemon=True)
    entering.start()
    entering.join(20)
    assert not entering.is_alive()


def test_what_has_begun_leaves_by_itself_also_when_it_is_dropped() -> None:
    dispatcher, may_go_on = Dispatcher(choose_device(0, 1, kind="cpu")), threading.Event()
    begun_turn = dispatcher.take_turn_of(lambda: iter([may_go_on.wait()]))
    launching = begun(begun_turn.begin)
    after = dispatcher.take_turn()
    begun_turn.drop()
    entering = begun(after.__enter__)
    entering.join(A_WHILE)
    assert entering.is_alive()
    may_go_on.set()
    launching.join()
    entering.join()
    after.leave()


def test_messages_of_a_peer_start_as_they_were_submitted() -> None:
    order, started = StartOrder(), []
    runs = [
        order.behind(peer, lambda name=name: started.append(name) or [])
        for peer, name in ((1, "first"), (1, "second"), (2, "other"))
    ]
    second = begun(runs[1])
    second.join(A_WHILE)
    assert second.is_alive()
    runs[2]()
    runs[0]()
    second.join()
    assert started == ["other", "first", "second"]


def test_a_message_that_could_not_start_holds_nobody_up() -> None:
    order, started = StartOrder(), []

    def fails() -> list[Any]:
        raise RuntimeError("no link")

    failing, behind = order.behind(1, fails), order.behind(1, lambda: started.append("behind") or [])
    try:
        failing()
    except RuntimeError as error:
        started.append(str(error))
    behind()
    assert started == ["no link", "behind"]
