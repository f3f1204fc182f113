"""The shm relay alone: messages that nobody reads for a while, and a peer that never reads."""

import errno
import os
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist

from hethub.communicator import prepare_by_ranges, reduce_scatter_by_ranges
from hethub.communicator.relays import shm, shm_connection
from hethub.communicator.relays.relay import PeerError
from hethub.communicator.relays.shm import ShmLink, ShmRelay
from hethub.communicator.relays.shm_connection import connect_same_host
from hethub.kernels.device import Device
from hethub.spec.ranges import Range
from tests.support.ranks import run_ranks, start_ranks, values


@pytest.fixture
def relays():
    """Two ends of one link."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pair = [ShmRelay({1 - rank: ShmLink(end, 1 - rank, Device(vendor="cpu"))}) for rank, end in enumerate(ends)]
    yield pair
    for relay in pair:
        relay.close()


def message(number, num_elements):
    return torch.full((num_elements,), float(number))


@pytest.mark.parametrize("num_elements", [1, 30_000], ids=["with the bell", "in blocks"])
def test_both_sides_send_hundreds_of_messages_before_they_read(relays, num_elements):
    count = 600
    for rank, relay in enumerate(relays):
        for number in range(count):
            relay.send(message(number + rank, num_elements), 1 - rank, tag=number % 3)
    for rank, relay in enumerate(relays):
        for number in range(count):
            received = torch.empty(num_elements)
            relay.receive(received, 1 - rank, tag=number % 3).wait()
            assert torch.equal(received, message(number + 1 - rank, num_elements))


@pytest.mark.parametrize("sizes", [(1, 3), (3, 1), (30_000, 30_001)])
def test_a_message_of_another_size_is_an_error(relays, sizes):
    """torch copies one element to as many as are asked for."""
    sent, expected = sizes
    relays[0].send(message(1, sent), 1, tag=0)
    with pytest.raises(
        PeerError, match=f"sent {4 * sent} bytes, and {4 * expected} were expected: the two ranks' tensors"
    ):
        relays[1].receive(torch.empty(expected), 0, tag=0).wait()


def test_who_reads_for_another_tells_it(relays):
    """One thread waits for the socket; the message that comes is another's, who waits for no more than that."""
    first, second = (
        threading.Thread(target=relays[1].receive(torch.empty(2), 0, tag=tag).wait, daemon=True) for tag in (0, 1)
    )
    first.start()
    time.sleep(0.1)  # the first one reads by now, and then the second one waits for it
    second.start()
    time.sleep(0.1)
    relays[0].send(message(1, 2), 1, tag=1)
    second.join(20)
    assert not second.is_alive()
    assert first.is_alive()
    relays[0].send(message(1, 2), 1, tag=0)
    first.join(20)
    assert not first.is_alive()


def test_a_block_is_no_larger_than_its_message_and_keeps_no_descriptor(relays):
    """A process may have a thousand of them."""
    before = len(os.listdir("/proc/self/fd"))
    lent = relays[0].outgoing(2**18, torch.float32, 1)
    assert lent.tensor.untyped_storage().nbytes() == 2**20
    lent.tensor.fill_(3.0)
    lent.send(0)
    lent.release()
    received = torch.empty(2**18)
    relays[1].receive(received, 0, tag=0).wait()
    assert torch.equal(received, message(3, 2**18))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_peer_that_never_reads_is_an_error(relays, monkeypatch):
    monkeypatch.setattr(shm, "_MAX_QUEUED", 10)

    def send_until_refused():
        for number in range(100_000):
            relays[0].send(message(number, 1), 1, tag=0)

    with pytest.raises(PeerError, match="left 10 messages unread"):
        send_until_refused()


def outboxes():
    return [thread for thread in threading.enumerate() if thread.name == "hethub-shm-outbox"]


def test_the_end_of_a_peer_ends_the_queue(relays):
    descriptors = len(os.listdir("/proc/self/fd"))
    for number in range(400):
        relays[0].send(message(number, 30_000), 1, tag=0)
    relays[1].close()
    for thread in outboxes():
        thread.join(10)
    assert not outboxes()
    with pytest.raises(PeerError, match="connection closed"):
        relays[0].send(message(0, 1), 1, tag=0)
    with pytest.raises(PeerError, match="connection closed"):
        relays[0]._links[1]._make_block(1 << 20)
    assert len(os.listdir("/proc/self/fd")) < descriptors  # the peer's socket is closed, and nothing else is open


class Limited(socket.socket):
    """A socket that passes no descriptor before it may: the kernel limits how many of a user's are under way."""

    may_pass = False

    def sendmsg(self, buffers, rights=(), flags=0):
        if rights and not self.may_pass:
            raise OSError(errno.ETOOMANYREFS, "Too many references")
        return super().sendmsg(buffers, rights, flags)


def test_no_message_overtakes_one_that_waits_in_the_queue():
    """The first message's block cannot be passed yet; what is sent after it would find room on the socket."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    limited = Limited(fileno=one.detach())
    near = ShmRelay({1: ShmLink(limited, 1, Device(vendor="cpu"))})
    far = ShmRelay({0: ShmLink(other, 0, Device(vendor="cpu"))})
    sizes = [30_000, 1, 2]
    for number, size in enumerate(sizes):
        near.send(message(number, size), 1, tag=0)
    limited.may_pass = True
    for number, size in enumerate(sizes):
        received = torch.empty(size)
        far.receive(received, 0, tag=0).wait()
        assert torch.equal(received, message(number, size))
    for relay in (near, far):
        relay.close()


def test_who_only_sends_takes_the_blocks_that_come_back(relays):
    before, received = mapped_blocks(), torch.empty(30_000)
    for number in range(20):
        relays[0].send(message(number, 30_000), 1, tag=0)
        relays[1].receive(received, 0, tag=0).wait()
    assert mapped_blocks() - before <= 2  # one, on both sides


def test_what_a_peer_sent_in_a_block_before_it_left_is_read(relays):
    """The block cannot be given back."""
    relays[0].send(message(7, 30_000), 1, tag=0)
    relays[0].close()
    received = torch.empty(30_000)
    relays[1].receive(received, 0, tag=0).wait()
    assert torch.equal(received, message(7, 30_000))


def submit_hundreds_before_the_peer_reads(world):
    """Rank 0 broadcasts far ahead of a rank that waits for something else first."""
    store = world._context.rendezvous.store
    tensors = [torch.full((20_000,), float(number)) for number in range(500)]
    if world.rank == 0:
        works = [dist.broadcast(tensor, 0, async_op=True) for tensor in tensors]
        works[-1].wait()
        store.set("sent", "")
    else:
        store.get("sent")
        works = [dist.broadcast(tensor.zero_(), 0, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()
    return [tensor[0].item() for tensor in tensors] == [float(number) for number in range(500)]


def test_a_rank_may_run_hundreds_of_broadcasts_ahead():
    assert all(run_ranks(2, submit_hundreds_before_the_peer_reads, islands=[[0], [1]], timeout_seconds=60))


@pytest.mark.parametrize(("failure", "error"), [(None, TimeoutError), ("rank 1 failed: on purpose", ConnectionError)])
def test_a_rank_of_the_host_that_never_comes_is_not_waited_for_without_end(monkeypatch, failure, error):
    monkeypatch.setattr(shm_connection, "_LOOK_SECONDS", 0.1)
    watch = SimpleNamespace(liveness=SimpleNamespace(failure=failure))
    rendezvous = SimpleNamespace(rank=0, store=dist.HashStore(), token="t", watch=watch)
    with pytest.raises(error, match=failure):
        connect_same_host(rendezvous, ["here", "here"], 0.25, Device(vendor="cpu"))


def mapped_blocks():
    """Blocks of shared memory that this process has, its own and its peers'."""
    return sum("memfd:hethub" in line for line in Path("/proc/self/maps").read_text().splitlines())


def sums_for_a_late_owner(world, ranges):
    """How many blocks this rank has mapped when it has begun forty sums for ranks that come later, and has had a second for
    them; that the sums are right."""
    store = world._context.rendezvous.store
    tensors = [torch.full((30_000,), float(number + world.rank)) for number in range(40)]
    works, mapped = [], 0
    prepare_by_ranges(dist.group.WORLD)
    if world.rank:
        store.get("begun")
    for tensor in tensors:
        works.append(reduce_scatter_by_ranges(dist.group.WORLD, tensor, ranges))
    if not world.rank:
        time.sleep(1.0)
        mapped = mapped_blocks()
        store.set("begun", "")
    for work in works:
        work.wait()
    mine, total = ranges[world.rank], sum(range(world.size))
    right = [
        tensor[mine.start : mine.stop].eq(world.size * number + total).all() for number, tensor in enumerate(tensors)
    ]
    return mapped, all(right)


@pytest.mark.parametrize(
    ("islands", "staged"),
    [([[0, 1, 2]], []), ([[0, 1], [2]], []), ([[0], [1], [2]], []), ([[0], [1], [2]], [0, 1, 2])],
    ids=["3", "2+1", "1+1+1", "1+1+1, staged"],
)
def test_a_rank_that_gets_nothing_of_sums_is_not_far_ahead(islands, staged):
    """It waits for nobody's part, and had all sums in memory at once; now one for each other rank, or a few in chunks."""
    ranges = [Range(0, 0), Range(0, 10_000), Range(10_000, 30_000)]
    found = run_ranks(3, sums_for_a_late_owner, ranges, islands=islands, staged_ranks=staged, timeout_seconds=60)
    assert all(right for _, right in found)
    assert found[0][0] <= 8


def blocks_made(world):
    """The blocks that this rank has mapped after five rounds of what takes them, and how many sixteen more add."""
    found, after, before = [], (world.rank + 1) % world.size, (world.rank - 1) % world.size
    for rounds in (5, 16):
        for _ in range(rounds):
            for size in (10_000, 300_000):  # the first goes to everybody in one hop
                dist.all_reduce(torch.ones(size))
            part, gathered = torch.ones(30_000), torch.empty(30_000 * world.size)
            dist.reduce_scatter_tensor(part, torch.ones(30_000 * world.size))
            dist.all_gather_into_tensor(gathered, part)
            arrival = world.receive(torch.empty(30_000), before)
            world.send(part, after).wait()
            arrival.wait()
            world.barrier()
        found.append(mapped_blocks())
    return found[0], found[1] - found[0]


@pytest.mark.parametrize("staged", [[], [0, 1, 2]], ids=["host", "staged"])
@pytest.mark.parametrize("islands", [[[0, 1], [2]], [[0], [1], [2]]], ids=["2+1", "1+1+1"])
def test_operations_give_their_blocks_back(islands, staged):
    """One that is kept each time would make a block each time."""
    for at_first, more in run_ranks(3, blocks_made, islands=islands, staged_ranks=staged, timeout_seconds=60):
        assert at_first > 0
        assert more < 8, (at_first, more)


class Pinning(Device):
    """Counts what is pinned."""

    pinned: ClassVar[list[int]] = []

    def pin(self, memory: torch.Tensor) -> None:
        self.pinned.append(memory.data_ptr())

    def unpin(self, memory: torch.Tensor) -> None:
        self.pinned.remove(memory.data_ptr())


def linked() -> tuple[ShmLink, ShmLink]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    device = Pinning(vendor="cpu")
    return ShmLink(one, 1, device), ShmLink(other, 0, device)


def test_blocks_are_unpinned_before_their_memory_goes() -> None:
    near, far = linked()
    near.send(torch.ones(100_000), 7)
    block, *_ = far.take(7, far.expect(7))
    assert bool((block.view(400_000, torch.float32) == 1).all())
    assert len(Pinning.pinned) == 2  # each side maps it
    near.close()
    far.close()
    assert Pinning.pinned == []


def test_what_a_peer_sent_before_it_left_is_read_though_it_left_bells_unread() -> None:
    near, far = linked()
    far.send(torch.arange(10.0), 7)
    near.send(torch.ones(10), 8)
    far.close()
    carried, num_bytes, _ = near.take(7, near.expect(7))
    assert carried.view(num_bytes, torch.float32).tolist() == list(range(10))
    with pytest.raises(PeerError, match="connection closed"):
        near.take(7, near.expect(7))
    near.close()


def leave_before_the_peer_reads(rank, store):
    """Rank 0's broadcasts are over, and most of them queued, when it leaves."""
    dist.init_process_group("hethub", store=store, rank=rank, world_size=2)
    tensors = [torch.full((1000,), float(number)) if rank == 0 else torch.zeros(1000) for number in range(300)]
    if rank == 1:
        store.wait(["sent"])
        time.sleep(0.5)
    for tensor in tensors:
        dist.broadcast(tensor, 0)
    if rank == 0:
        store.set("sent", "")
    dist.destroy_process_group()
    return [tensor[0].item() for tensor in tensors]


def test_what_is_queued_leaves_before_its_rank() -> None:
    outcomes = start_ranks(2, leave_before_the_peer_reads, environment={"HETHUB_ISLANDS": "0|1"}, timeout_seconds=60)
    assert values(outcomes) == [list(range(300))] * 2


def test_a_peer_that_reads_nothing_more_is_not_waited_for_without_end() -> None:
    """Not at all, where it is only to have its blocks back."""
    near, far = linked()
    for _ in range(600):
        near.send(torch.ones(10_000), 7)
    near._leaving_seconds, far._leaving_seconds = 0.5, 60.0
    for _ in range(600):
        block, *_ = far.take(7, far.expect(7))
        far.give_back(block)
    assert far._outbox
    start = time.monotonic()
    far.close()
    assert time.monotonic() - start < 30
    near, far = linked()
    near._leaving_seconds = 0.5
    for _ in range(600):
        near.send(torch.ones(10), 7)
    start = time.monotonic()
    near.close()
    assert 0.5 <= time.monotonic() - start < 30
    far.close()
