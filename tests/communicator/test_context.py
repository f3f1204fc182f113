"""What groups of one process share, by parts that only note what is asked of them."""

import contextlib
import gc
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from hethub.communicator import context as context_module
from hethub.communicator import torch_private
from hethub.communicator.context import Context, spanning_name
from hethub.communicator.joining.connection import Failure
from hethub.communicator.joining.rendezvous import NEWS_SECONDS
from hethub.kernels.device import Device
from hethub.spec.errors import RunFailed

GONE = Failure(rank=1, reason="is gone")


class Noting:
    """Whatever is called on it is noted, by its name and what it was given."""

    def __init__(self, notes, name="", **parts):
        self.__dict__.update(parts)
        self._notes, self._name = notes, name

    def __getattr__(self, name):
        return lambda *given: self._notes.append((f"{self._name}{name}", *given))


@pytest.fixture
def notes(monkeypatch):
    """What was asked for, connections in words instead of sockets."""
    found = []
    for name, word in (("break_gloo_group", "breaks"), ("break_store", "breaks store")):
        monkeypatch.setattr(torch_private, name, lambda *given, word=word: found.append((word, *given)))
    monkeypatch.setattr(
        context_module, "connect_gloo", lambda _, key, members, seconds: found.append((key, members, seconds)) or key
    )
    return found


def context_of(notes, failure=None, **more):
    liveness = Noting(notes, failure=failure, wait_for_failure=lambda s: notes.append(("waits", s)) or failure)
    watch = Noting(notes, "watch ", liveness=liveness)
    rendezvous = Noting(notes, rank=2, size=4, store="the store")
    relay = Noting(notes, "relay ")
    given = {"islands": ((0, 1), (2, 3)), "relays": {0: [relay], 1: [relay]}, "hosts": ["a"] * 4, "timeout_seconds": 60}
    given |= {"gloo": "world", "relay_choice": None, "store_server": 1, "device_ranks": frozenset([0])}
    return Context(rendezvous=rendezvous, watch=watch, device=Device(vendor="cpu"), **{**given, **more})


@pytest.mark.parametrize(("is_known", "failure"), [(False, None), (True, None), (False, GONE)])
def test_the_first_failure_counts_and_is_told_to_who_does_not_know(notes, monkeypatch, is_known, failure):
    monkeypatch.setattr(context_module, "run_apart", lambda run: notes.append(("apart", context.given_up)) or run())
    context = context_of(notes, failure)
    context.require_whole("a sum")
    for reason in ("no memory", "what follows from it"):
        context.give_up(RunFailed(reason), is_known=is_known)
    told = [("report", "failed: no memory"), ("apart", True), ("relay abort",), ("breaks", "world", 2, 4)]
    assert notes == ([] if is_known or failure else told)
    assert context.given_up == (not is_known)
    with pytest.raises(RunFailed, match="a sum cannot run on rank 2, behind an operation that failed: no memory"):
        context.require_whole("a sum")


def test_a_cause_is_waited_for_a_moment(notes):
    assert context_of(notes).explain() is None
    assert context_of(notes, GONE).explain() == "rank 1 is gone"
    assert notes == [("waits", NEWS_SECONDS)] * 2


def test_groups_meet_elsewhere_each_time_and_who_shares_no_member_does(notes):
    context, other = context_of(notes), context_of(notes)
    places = [context.meeting_place("gloo", "1", members) for members in ([0, 2], [0, 2], [1, 2])]
    assert len(set(places)) == 3
    assert places == [other.meeting_place("gloo", "1", members) for members in ([0, 2], [0, 2], [1, 2])]
    assert other.meeting_place("native", "1", [0, 2]) not in places
    assert places[2] == context_of(notes).meeting_place("gloo", "1", [1, 2])  # on a rank that is in no other


def test_a_group_has_its_own_timeout_or_the_worlds(notes):
    context = context_of(notes)
    for seconds, found in ((None, 60), (5.0, 5.0)):
        key = context.gloo_group("name", [0, 2], seconds)
        assert notes[-1] == (key, [0, 2], found)


def test_what_is_released_is_not_given_up_and_all_else_is(notes):
    context = context_of(notes)
    kept, gone = (context.gloo_group(name, [0, 2]) for name in ("kept", "gone"))
    for name in ("kept", "gone"):
        context.watch_nccl(Noting(notes, f"nccl {name} "), name)
        context.spanning[spanning_name(name)] = Noting(notes, f"over {name} ")
        context._bridges[name] = name
    context.release("gone")
    context.abort(GONE)
    assert notes[2:] == [
        ("over gone shutdown",), ("relay abort",), ("breaks", "world", 2, 4), ("breaks", kept, 1, 2),
        ("breaks store", "the store"), ("nccl kept abort",),
    ]  # fmt: skip
    assert gone != kept
    assert list(context._bridges) == ["kept"]
    assert context.given_up


@pytest.mark.parametrize("failure", [None, Failure(rank=0, reason="is gone")])
def test_a_store_that_goes_on_is_not_broken_nor_is_the_rest_kept_by_a_group_that_cannot_be_aborted(notes, failure):
    def refuse():
        raise RuntimeError("not now")

    context = context_of(notes)
    for abort in (refuse, lambda: notes.append("aborts")):
        context.watch_nccl(SimpleNamespace(abort=abort), "a group")
    context.abort(failure)
    assert notes == [("relay abort",), ("breaks", "world", 2, 4), "aborts"]


def test_an_islands_library_is_given_up_too(notes, monkeypatch):
    context, library = context_of(notes), Noting(notes, "nccl ")
    context.rendezvous.store, context.device = dist.HashStore(), SimpleNamespace(is_gpu=True)
    monkeypatch.setattr(
        torch_private, "create_nccl_group", lambda _, *given, **more: notes.append((*given, more)) or library
    )
    assert context.native_group("name", [1, 2, 3], 5.0, for_messages=True) is library
    context.abort()
    assert notes[0] == (1, 3, 5.0, {"for_messages": True})
    assert notes[-1] == ("nccl abort",)


class Group:
    pass


def test_what_was_made_for_a_native_group_goes_with_it_or_with_the_next_of_its_name(notes):
    context, groups = context_of(notes), [Group(), Group()]
    for group in groups:
        context.release_with(group, "name")
        context.spanning[spanning_name("name")] = Noting(notes)
        assert not context._releases["name"].atexit
    assert notes == [("shutdown",)]
    del group
    groups.pop(0)
    gc.collect()
    assert notes == [("shutdown",)]  # what the second has is its own
    groups.clear()
    gc.collect()
    assert notes == [("shutdown",)] * 2
    assert not context._releases


def test_a_native_group_may_be_collected_in_a_thread_that_holds_a_lock(notes):
    """Of its context or of the counters, under which tuples and lists are made: any of these may begin a collection."""
    context, group = context_of(notes), Group()
    context.release_with(group, "name")
    context.spanning[spanning_name("name")] = SimpleNamespace(shutdown=lambda: context.counters.fold("name"))
    group.itself = group
    del group

    def collect():
        with context._lock, context.counters._lock:
            gc.collect()

    collecting = threading.Thread(target=collect, daemon=True)
    collecting.start()
    collecting.join(20)
    assert not collecting.is_alive()
    assert not context.spanning


@pytest.mark.parametrize("failure", [None, GONE])
def test_a_world_is_left_once_and_with_its_launcher_only_when_all_is_well(notes, failure):
    context = context_of(notes, failure)
    context.callbacks = Noting(notes, "callbacks ")
    context.close()
    context.close()
    finalized = [] if failure else [("finalize",)]
    assert notes == [("relay close",), *finalized, ("watch close",), ("callbacks stop",)]


@pytest.mark.parametrize(
    ("is_gpu", "stages", "on_host", "barrier"),
    [(False, False, False, False), (False, True, True, True), (True, False, False, True), (True, True, True, True)],
)
def test_what_launches_on_a_device_takes_a_turn(notes, is_gpu, stages, on_host, barrier):
    """Whether tensors of the host do, and a barrier, which has none; those of a device always do."""
    context, turn = context_of(notes, stages_host_tensors=stages), contextlib.nullcontext()
    context.device, context.dispatcher = SimpleNamespace(is_gpu=is_gpu), SimpleNamespace(take_turn=lambda: turn)
    tensors = [torch.ones(1)], [], [torch.ones(1), torch.ones(1, device="meta")]
    assert [context.turn_of(each) is turn for each in tensors] == [on_host, barrier, True]


def test_a_number_is_drawn_once_and_nothing_of_it_is_left_in_the_store(notes):
    store, found = dist.HashStore(), {}

    def ask(rank):
        context = context_of(notes)
        context.rendezvous = SimpleNamespace(rank=rank, size=4, store=store)
        context.watch.liveness.look_for = lambda members: lambda seconds: None
        found[rank] = [context._agree_on_number("name", [1, 2, 3], 20) for _ in range(2)]

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in (3, 2, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == {rank: [1, 2] for rank in (1, 2, 3)}
    assert store.num_keys() == 1  # how many were drawn
