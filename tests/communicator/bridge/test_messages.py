"""Which way a message takes and what becomes of it at its ends, over groups that only note what they are given."""

import os
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from hethub.communicator.bridge.messages import Landed, PointToPoint
from hethub.communicator.bridge.staging import Stager
from hethub.communicator.counters import Counters
from hethub.communicator.relays.gloo import sized
from hethub.communicator.work import CallbackThreads, NativeWork, Operation
from hethub.kernels.device import Device
from hethub.kernels.reference import TorchKernels
from hethub.spec.errors import RunFailed
from tests.support.ranks import run_ranks, start_ranks

CPU = Device(vendor="cpu")


class Asked:
    """A library's Work, which fills what is received when it is waited for."""

    def __init__(self, tensor=None):
        self.tensor, self.waits = tensor, []

    def wait(self, *timeout):
        self.waits.append(timeout)
        if self.tensor is not None:
            self.tensor.fill_(7.0)

    def is_completed(self):
        return True


class Group:
    """A library's group, which notes each message: what, with whom, under which tag."""

    def __init__(self):
        self.given, self.works = [], []

    def _begun(self, what, tensor, *where):
        self.given.append((what, tensor, *where))
        self.works.append(Asked(tensor if what == "receive" else None))
        return self.works[-1]

    def send(self, tensors, peer, tag):
        return self._begun("send", tensors[0], peer, tag)

    def recv(self, tensors, peer, tag):
        return self._begun("receive", tensors[0], peer, tag)

    def recv_anysource(self, tensors, tag):
        return self._begun("receive", tensors[0], "any", tag)


class Process(SimpleNamespace):
    """Rank 1 of an island of two, beside an island of one."""

    def __init__(self, **more):
        own = {"rank": 1, "islands": ((0, 1), (2,)), "device": CPU, "device_ranks": frozenset(), "given_up": False}
        own |= {"counters": Counters(), "callbacks": CallbackThreads(CPU.activate), "stages": False}
        super().__init__(**{**own, **more})

    def stager(self):
        return Stager(device=CPU, kernels=TorchKernels(), stream=CPU.new_stream(), stages_host_tensors=self.stages)


def messages_of(process, up=None, down=None, links=None):
    return PointToPoint(up or Group(), process, range(3), "a group", links, down)


def operation(name="send", peer=None):
    explainer = SimpleNamespace(explain=lambda: None)
    return Operation(name=name, group="a group", rank=1, explainer=explainer, peer=peer)


def test_each_way_has_its_connection_and_what_is_sent_is_counted():
    up, down, process = Group(), Group(), Process()
    messages = messages_of(process, up, down)
    tensor = torch.ones(3)
    for peer in (0, 2):
        messages.send(tensor, peer, 10 + peer, operation())
        messages.receive(tensor, peer, 20 + peer, operation())
    found = [[(what, *where) for what, _, *where in group.given] for group in (up, down)]
    assert found[0] == [("receive", 0, sized(20, tensor)), ("send", 2, sized(12, tensor))]
    assert found[1] == [("send", 0, sized(10, tensor)), ("receive", 2, sized(22, tensor))]
    links = {(link["peer"], link["level"]): link["bytes"] for link in process.counters.to_dict()["links"]}
    assert links == {(0, "island"): 12, (2, "bridge"): 12}


def test_messages_of_unlike_sizes_have_unlike_tags():
    """Whatever their own: those of a step, those of programs, and all that torch takes."""
    tags = [0, 1, 2, 100, 2**20, 2**31 - 2]
    given = {
        sized(tag, torch.empty(size, device="meta")) for tag in tags for size in (0, 1, 2, 3, 1000, 2**20, 2**20 + 1)
    }
    assert len(given) == 6 * 7
    assert all(0 <= tag < 2**31 - 1 for tag in given)  # the last one breaks a group


def test_what_is_staged_is_counted_and_sent_whole():
    group, process = Group(), Process(stages=True)
    messages = messages_of(process, group)
    assert messages.send(torch.arange(6.0)[::2], 2, 5, operation()).wait(timedelta(seconds=20))
    messages.close()
    ((what, sent, *where),) = group.given
    assert (what, sent.tolist(), where) == ("send", [0.0, 2.0, 4.0], [2, sized(5, sent)])
    assert [link["bytes"] for link in process.counters.to_dict()["links"]] == [12]


def test_one_connection_carries_both_ways_where_there_is_no_other():
    group = Group()
    messages = messages_of(Process(), group)
    for peer in (0, 2):  # as a library's own: what fails here ends messages, and not the world
        assert isinstance(messages.send(torch.ones(3), peer, 0, operation()), NativeWork)
    assert [where for _, _, *where in group.given] == [[peer, sized(0, torch.ones(3))] for peer in (0, 2)]


@pytest.mark.parametrize(
    "tensor", [torch.arange(6.0)[::2], torch.ones(2, dtype=torch.complex64).conj(), torch.ones(2, dtype=torch.complex64).conj().imag]
)  # fmt: skip
def test_what_is_sent_is_plain_memory(tensor):
    group = Group()
    messages_of(Process(), group).send(tensor, 0, 0, operation())
    ((_, sent, *_),) = group.given
    assert [sent.is_contiguous(), sent.is_conj(), sent.is_neg()] == [True, False, False]
    assert torch.equal(sent, tensor)


@pytest.mark.parametrize(
    "tensor", [torch.ones(2, 3, dtype=torch.complex64).mul(1j).conj(), torch._neg_view(torch.ones(2, 3))]
)
def test_what_is_copied_to_the_host_is_plain_on_the_device_already(tensor, monkeypatch):
    """torch conjugates and negates behind the copy, in the host's memory, to which one under way has yet to come."""
    given, copy = [], torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda into, *source, **how: given.extend(source) or copy(into, *source))
    assert torch.equal(Process(stages=True).stager().stage(tensor).load_whole().view(2, 3), tensor)
    assert [(source.is_conj(), source.is_neg()) for source in given] == [(False, False)]


@pytest.mark.parametrize("start", ["receive", "receive_any"])
def test_a_message_comes_to_where_it_was_asked_for_once(start):
    group, whole = Group(), torch.zeros(3, 2, requires_grad=True)
    tensor, peer = whole[:, 0], [0] * (start == "receive")
    work = getattr(messages_of(Process(), group), start)(tensor, *peer, 5, operation("recv"))
    assert not work.is_completed()
    for timeout in (None, timedelta(seconds=3)):
        assert work.wait(timeout)
        assert whole.tolist() == ([[7.0, 0.0]] * 3 if timeout is None else [[1.0, 0.0]] * 3)
        with torch.no_grad():
            tensor.fill_(1.0)  # what the program does with it is not undone
    assert work.is_completed()
    assert group.works[0].waits == [(), (timedelta(seconds=3),)]


def test_nothing_is_received_from_anyone_where_all_was_given_up():
    aborted = messages_of(Process())
    aborted.abort()
    for messages in (aborted, messages_of(Process(given_up=True))):
        with pytest.raises(RunFailed, match="the group was given up; build it anew"):
            messages.receive_any(torch.ones(3), 0, operation("recv from any rank"))


@pytest.mark.parametrize(
    ("device_ranks", "found"), [([], [False, False]), ([0], [False, False]), ([1], [False, True]), ([2], [False, True])]
)
def test_relays_carry_between_islands_where_one_of_the_two_has_a_device(device_ranks, found):
    links = SimpleNamespace()
    messages = messages_of(Process(device_ranks=frozenset(device_ranks)), links=links)
    assert [messages._takes_links(peer) for peer in (0, 2)] == found
    assert not messages_of(Process(device_ranks=frozenset(device_ranks)))._takes_links(2)


def test_a_thread_that_has_sent_ends_with_its_group():
    messages = messages_of(Process(), links=SimpleNamespace())
    assert messages.send(torch.ones(3), 2, 0, operation()).wait(timedelta(seconds=20))
    ((worker, _),) = messages._senders.values()
    messages.close()
    assert not worker._thread.is_alive()


def test_devices_connect_in_one_order_and_wait_for_it():
    groups, asked = {}, []

    def native_group(name, ranks, seconds, *, for_messages):
        assert for_messages
        asked.append(tuple(ranks))
        return groups.setdefault(tuple(ranks), Group())

    device = SimpleNamespace(torch_device=torch.device("cpu"))
    process = Process(device_ranks=frozenset([1]), native_group=native_group, timeout_seconds=60)
    messages = messages_of(process)
    process.device = device
    messages.connect([2, 0], [2, 0])
    assert asked == [(0, 1), (1, 0), (1, 2), (2, 1)]
    assert [work.waits for group in groups.values() for work in group.works] == [[()]] * 4
    process.rank = 0  # which has no device
    messages.connect([2], [2])
    assert len(asked) == 4


def test_what_has_landed_elsewhere_is_copied_once():
    place, tensor, work = torch.ones(4), torch.zeros(2, 2, requires_grad=True), Asked()
    stream = SimpleNamespace(keep=lambda _: None)
    landed = Landed(work, place, tensor, SimpleNamespace(current_stream=lambda: stream))
    assert landed.wait()
    place.fill_(2.0)
    assert landed.wait(timedelta(seconds=3))
    assert tensor.tolist() == [[1.0, 1.0]] * 2
    assert work.waits == [(), (timedelta(seconds=3),)]


def copies_of_a_message(world):
    """Seconds that this rank's sends and receives over the bridge spent on copies."""
    message = torch.ones(1_000_000)
    world.send(message, 1, 7).wait() if world.rank == 0 else world.receive(message, 0, 7).wait()
    return [row["legs"].get("copy", 0.0) for row in world.counters()["operations"] if row["operation"] == "send"]


def test_copies_of_messages_to_the_host_are_counted():
    """They were timed for each message and never added: what staging costs was nowhere to be seen."""
    sent, received = run_ranks(2, copies_of_a_message, islands=[[0], [1]], staged_ranks=[0])
    assert [seconds > 0 for seconds in sent] == [True]
    assert received == []


def begin_a_message_with_a_rank_that_is_gone(world, sends):
    if world.rank == 1:
        os._exit(3)
    while world.failure is None:
        time.sleep(0.05)
    with pytest.raises(RunFailed) as failed:
        (world.send if sends else world.receive)(torch.ones(100_000), 1, tag=5).wait()
    return str(failed.value)


@pytest.mark.parametrize("sends", [True, False])
@pytest.mark.parametrize("relay", ["shm", "gloo"])
def test_a_message_over_the_bridge_that_cannot_begin_names_who_failed(relay, sends):
    """It raised what the relay had said: sent over shm as soon as memory was asked for, received over Gloo at once."""
    connect = {"islands": [[0], [1]], "relay": relay, "staged_ranks": [0, 1], "timeout_seconds": 30}
    outcome, _ = start_ranks(2, begin_a_message_with_a_rank_that_is_gone, sends, connect=connect, timeout_seconds=60)
    assert outcome.value is not None, outcome.traceback
    assert "(tag 5) in the world of 2 ranks failed on rank 0 with rank 1: rank 1 is gone" in outcome.value
