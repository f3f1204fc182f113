"""The path of device tensors, run on the CPU: host tensors staged as a device's, Gloo in the place of NCCL."""

import os
import random
import re
import signal
import threading
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from hethub.communicator import (
    Rendezvous,
    all_gather_by_ranges,
    connect,
    reduce_scatter_by_ranges,
    torch_private,
)
from hethub.communicator.bridge.launch_order import Dispatcher
from hethub.communicator.bridge.links import Links
from hethub.communicator.counters import since
from hethub.communicator.work import CallbackThreads, HethubWork, Job, Operation, Worker
from hethub.kernels.device import Device
from hethub.spec.errors import BadInput, RunFailed
from hethub.spec.ranges import from_sizes
from tests.communicator.groups.test_operations import LAYOUTS, move_all_types, premul_and_coalesced, reduce_all_cases
from tests.support.ranks import meet, run_ranks, start_ranks, values

STAGED = [
    pytest.param([[0, 1], [2, 3]], [0, 1, 2, 3], id="2+2, both on devices"),
    pytest.param([[0, 3, 1], [2]], [0, 1, 3], id="3 on devices + 1 CPU"),
    pytest.param([[0, 3, 1], [2]], [2], id="3 CPUs + 1 on a device"),
    pytest.param([[0, 2], [1], [3]], [0, 1, 2], id="three islands, one of them a CPU"),
]


def contribution(rank, size, dtype=torch.float32):
    return torch.randn(size, generator=torch.Generator().manual_seed(rank)).to(dtype)


def reduce_large(world, sizes, staged):
    """The largest error against float64, after checking that all ranks hold the same bits."""
    assert (world.default_group._legs is not None) == (world.rank in staged)
    errors = []
    for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.PRODUCT):
        for size in sizes if op == ReduceOp.SUM else sizes[:1]:
            inputs = torch.stack([contribution(rank, size) for rank in range(world.size)]).double()
            exact = {
                ReduceOp.SUM: inputs.sum(0),
                ReduceOp.AVG: inputs.mean(0),
                ReduceOp.MAX: inputs.amax(0),
                ReduceOp.PRODUCT: inputs.prod(0),
            }[op]
            tensor = contribution(world.rank, size)
            dist.all_reduce(tensor, op=op)
            errors.append(((tensor - exact).norm() / exact.norm()).item())
            everybody = [torch.empty_like(tensor) for _ in range(world.size)]
            dist.all_gather(everybody, tensor)
            assert all(torch.equal(other, tensor) for other in everybody)
    sent = world._context.counters.bridge_bytes()
    tensor = torch.ones(400_000)
    dist.all_reduce(tensor)
    return max(errors), world._context.counters.bridge_bytes() - sent


@pytest.mark.parametrize(("islands", "staged"), STAGED)
@pytest.mark.parametrize("relay", ["gloo", "shm"])
def test_native_legs_reduce_and_agree(islands, staged, relay):
    sizes = [100_003, 2_200_001]
    found = run_ranks(4, reduce_large, sizes, staged, islands=islands, relay=relay, staged_ranks=staged)
    assert max(error for error, _ in found) < 1e-6
    assert sum(sent for _, sent in found) == 2 * (len(islands) - 1) * 4 * 400_000


@pytest.mark.parametrize("wire", ["bf16", "int8", "fp8"])
@pytest.mark.parametrize(("islands", "staged"), STAGED)
def test_narrow_wires_agree_between_devices_and_cpus(islands, staged, wire):
    bounds = {"bf16": 8e-3, "int8": 2e-2, "fp8": 6e-2}
    sizes = [100_003, 300_007]
    for error, _ in run_ranks(4, reduce_large, sizes, staged, islands=islands, wire=wire, staged_ranks=staged):
        assert 1e-6 < error < bounds[wire]


@pytest.mark.parametrize(
    ("islands", "staged"),
    [STAGED[1], pytest.param(*STAGED[3].values, id=STAGED[3].id, marks=pytest.mark.slow)],
)
def test_all_operations_on_staged_tensors(islands, staged):
    options = {"islands": islands, "staged_ranks": staged, "environment": {"PYTHONHASHSEED": "0"}}
    results = run_ranks(4, reduce_all_cases, **options)
    for bits, wrong in results:
        assert wrong == []
        assert bits == results[0][0]
    for wrong in run_ranks(4, move_all_types, **options):
        assert wrong == []


def test_coalesced_operations_on_staged_tensors():
    assert all(run_ranks(3, premul_and_coalesced, islands=[[0, 2], [1]], staged_ranks=[0, 1, 2]))


def reduce_scaled_and_strided(world):
    """Large tensors, so that the island's library does the legs: also for a rank that is alone in its island."""
    legs = world.default_group._legs
    assert legs is not None
    assert (legs.library.group is None) == (world.rank == 2)
    factor = torch.distributed._make_nccl_premul_sum(0.5)
    tensor = torch.arange(200_000.0) + world.rank
    dist.all_reduce(tensor, op=factor)
    assert torch.equal(tensor, 0.5 * (3 * torch.arange(200_000.0) + 3))
    # The layout is each rank's own; the way must be the same for all.
    values = torch.arange(200_000.0).view(400, 500) + world.rank
    strided = torch.empty(500, 400).t().copy_(values) if world.rank else values.clone()
    dist.all_reduce(strided)
    assert torch.equal(strided, 3 * torch.arange(200_000.0).view(400, 500) + 3)
    return True


def test_scaled_sums_and_strides_on_native_legs():
    assert all(
        run_ranks(3, reduce_scaled_and_strided, islands=[[0, 1], [2]], staged_ranks=[0, 1, 2], timeout_seconds=30)
    )


def shares_by_native_legs(world, sizes):
    """Bytes that this rank's relays carried inside its island and over the bridge, of a sum and a gather by ranges."""
    ranges = from_sizes(sizes)
    mine = ranges[world.rank]
    flat = contribution(world.rank, ranges[-1].stop)
    total = sum(contribution(rank, ranges[-1].stop).double() for rank in range(world.size))
    before = world.counters()
    reduce_scatter_by_ranges(world.default_group, flat, ranges).wait()
    assert (flat[mine.start : mine.stop] - total[mine.start : mine.stop]).abs().sum() < 1e-3 * len(total)
    all_gather_by_ranges(world.default_group, flat, ranges).wait()
    assert (flat - total).abs().max() < 1e-5
    news = since(before, world.counters())["links"]
    return {level: sum(row["bytes"] for row in news if row["level"] == level) for level in ("island", "bridge")}


@pytest.mark.parametrize("sizes", [[50_000] * 4, [100_003, 0, 7, 30_000]], ids=["even", "uneven"])
def test_shares_cross_once_and_nothing_of_an_island_leaves_its_library(sizes):
    sent = run_ranks(4, shares_by_native_legs, sizes, islands=[[0, 2], [1, 3]], staged_ranks=[0, 1, 2, 3])
    assert sum(of_rank["island"] for of_rank in sent) == 0
    # What each island owns comes to it once and leaves it once, for the other.
    assert sum(of_rank["bridge"] for of_rank in sent) == 2 * 4 * sum(sizes)


class Recorded:
    """A native group that notes what is launched on it."""

    def __init__(self, inner, name, launched):
        self._inner, self._name, self._launched = inner, name, launched

    def size(self):
        return self._inner.size()

    def _reduce_scatter_base(self, *args):
        self._launched.append(f"reduce-scatter {self._name}")
        return self._inner._reduce_scatter_base(*args)

    def _allgather_base(self, *args):
        self._launched.append(f"all-gather {self._name}")
        return self._inner._allgather_base(*args)


def reduce_on_three_groups(world):
    """What is launched on the island's library, in order, with three groups under way and ranks that dawdle."""
    members = [[0, 1, 2, 3], [0, 1, 2], [0, 1, 3]]
    groups = [world.group(ranks) for ranks in members]
    launched = []
    for name, group in enumerate(groups):
        if group is not None and group._legs.library.group is not None:
            group._legs.library.group = Recorded(group._legs.library.group, name, launched)
    dawdle = random.Random(world.rank)
    under_way = []
    for step in range(12):
        which = step % 3
        if groups[which] is not None:
            time.sleep(dawdle.random() * 0.02)
            tensor = torch.full((150_000 + step,), float(world.rank + step))
            under_way.append((step, which, tensor, dist.all_reduce(tensor, group=groups[which], async_op=True)))
    for step, which, tensor, work in reversed(under_way):
        work.wait()
        assert (tensor == sum(rank + step for rank in members[which])).all()
    return launched


def test_island_legs_of_all_groups_are_launched_in_one_order():
    islands = [[0, 1], [2, 3]]
    launched = run_ranks(4, reduce_on_three_groups, islands=islands, staged_ranks=[0, 1, 2, 3], timeout_seconds=60)
    assert launched[0] == launched[1]
    assert launched[0] == [f"{leg} {step % 3}" for step in range(12) for leg in ("reduce-scatter", "all-gather")]


def reduce_while_the_bridge_is_late(world):
    """What a tensor-parallel rank does while the weights of its next layers are on their way from the other island."""
    data = [group for group in (world.group([0, 2]), world.group([1, 3])) if group is not None]
    tensor = [group for group in (world.group([0, 1]), world.group([2, 3])) if group is not None]
    flats = [torch.full((2000,), float(world.rank)) for _ in range(3)]
    expect, may_arrive, in_time = Links.expect, threading.Event(), []

    def late(links, *message):
        incoming = expect(links, *message)
        wait = incoming.wait
        incoming.wait = lambda: in_time.append(may_arrive.wait(10)) or wait()
        return incoming

    with mock.patch.object(Links, "expect", late):
        works = [all_gather_by_ranges(data[0], flat, from_sizes([1000, 1000])) for flat in flats]
        works.append(dist.all_reduce(torch.ones(300_000), group=data[0], async_op=True))
        total = torch.ones(4)
        dist.all_reduce(total, group=tensor[0])
        may_arrive.set()
        for work in works:
            work.wait()
    assert (total == 2).all()
    assert all((flat[:1000] == world.rank % 2).all() and (flat[1000:] == world.rank % 2 + 2).all() for flat in flats)
    return in_time


def test_collectives_of_an_island_do_not_wait_for_what_a_rank_alone_there_is_sent():
    connect = {"islands": [[0, 1], [2, 3]], "staged_ranks": [0, 1, 2, 3], "relay": "gloo"}
    for in_time in run_ranks(4, reduce_while_the_bridge_is_late, **connect):
        assert in_time
        assert all(in_time)


def groups_in_any_order(world, seed):
    """Host tensors: every rank submits to three groups in an order of its own, which c10d allows."""
    members = [[0, 1, 2, 3], [0, 1, 2], [0, 3]]
    groups = [world.group(ranks) for ranks in members]
    mine = [which for which, group in enumerate(groups) if group is not None]
    own_order = random.Random(seed + world.rank)
    for step in range(10):
        under_way = []
        for which in own_order.sample(mine, len(mine)):
            tensor = torch.full((120_000,), float(world.rank + step))
            under_way.append((which, tensor, dist.all_reduce(tensor, group=groups[which], async_op=True)))
        for which, tensor, work in under_way:
            work.wait()
            assert (tensor == sum(rank + step for rank in members[which])).all()
    return True


@pytest.mark.parametrize("islands", [LAYOUTS["2+2"], LAYOUTS["1+2+1"]], ids=str)
def test_groups_on_host_tensors_go_in_any_order(islands):
    assert all(run_ranks(4, groups_in_any_order, 5, islands=islands, timeout_seconds=60))


def test_turns_come_in_the_order_taken_and_a_failed_one_frees_the_next():
    dispatcher = Dispatcher(Device(vendor="cpu"))
    turns = [dispatcher.take_turn() for _ in range(4)]
    entered = []

    def launch(number):
        with turns[number]:
            entered.append(number)

    turns[1].leave()  # it failed before its turn
    threads = [threading.Thread(target=launch, args=(number,), daemon=True) for number in (3, 2)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    assert entered == []  # the first has not been left
    launch(0)
    for thread in threads:
        thread.join(30)
    assert entered == [0, 2, 3]


def fail_inside_a_turn(world):
    """An operation on staged tensors fails; the ones behind it fail too instead of waiting for its turn for ever."""
    groups = [world.group([0, 1, 2, 3]), world.group([0, 1, 2])]
    meet(world)
    if world.rank == 3:
        world.abort("on purpose")
        return []
    works = [dist.all_reduce(torch.ones(200_000), group=group, async_op=True) for group in groups for _ in range(2)]
    failed = []
    for work in works:
        try:
            work.wait()
        except RuntimeError as error:
            failed.append(str(error))
    return failed


def test_a_failure_leaves_no_turn_behind():
    connect = {"islands": [[0, 1], [2, 3]], "staged_ranks": [0, 1, 2, 3], "timeout_seconds": 30}
    outcomes = start_ranks(4, fail_inside_a_turn, connect=connect, timeout_seconds=60)
    for outcome in outcomes[:3]:
        assert not outcome.timed_out
        assert len(outcome.value) == 4
        assert "rank 3 failed: on purpose" in outcome.value[0]


def staged_messages(world):
    """Tagged messages of staged tensors, contiguous or not, and no receive from just anybody."""
    peer = 1 - world.rank
    received, columns = torch.empty(1000), torch.empty(3, 5).t()
    far = [torch.empty(3) for _ in range(20)]
    works = [world.receive(columns, peer, 2), world.receive(received, peer, 1)]
    works += [world.receive(each, peer, number * 2**10) for number, each in enumerate(far)]
    sends = [
        world.send(torch.full((1000,), float(world.rank)), peer, 1),
        world.send(torch.arange(15.0).view(5, 3) + world.rank, peer, 2),
        *(world.send(torch.full((3,), float(number)), peer, number * 2**10) for number in range(len(far))),
    ]
    for work in [*works, *sends]:
        work.wait()
    assert (received == peer).all()
    assert torch.equal(columns, torch.arange(15.0).view(5, 3) + peer)
    assert [each.unique().item() for each in far] == list(range(len(far)))
    with pytest.raises(BadInput, match="host tensor"):
        dist.recv(received)
    return True


def test_messages_of_staged_tensors():
    assert all(run_ranks(2, staged_messages, islands=[[0], [1]], staged_ranks=[0, 1]))


def stage_half_an_island(rank, store):
    with pytest.raises(BadInput) as refused:
        connect(Rendezvous.on_one_host(store, rank, 2), islands=[[0, 1]], staged_ranks=[0])
    return str(refused.value)


def test_half_an_island_cannot_be_staged():
    for message in values(start_ranks(2, stage_half_an_island)):
        assert "only in part" in message


def test_native_collectives_are_called_by_their_private_names():
    assert {"_reduce_scatter_base", "_allgather_base"} <= set(dir(torch_private.GlooGroup))


def wait_instead_of_blocking(world):
    """No stream is blocked: the thread waits, and the result is there."""
    tensor = torch.full((200_000,), 1.0)
    dist.all_reduce(tensor, async_op=True).block_current_stream()
    assert (tensor == 2).all()
    received = torch.empty(3)
    arrival = world.receive(received, 1 - world.rank)
    sending = world.send(torch.ones(3), 1 - world.rank)
    arrival.block_current_stream()
    sending.block_current_stream()
    assert (received == 1).all()
    return True


@pytest.mark.parametrize("staged", [[], [0, 1]], ids=["host", "staged"])
def test_a_stream_is_not_blocked_by_a_kernel(staged):
    assert all(run_ranks(2, wait_instead_of_blocking, islands=[[0], [1]], staged_ranks=staged))


def test_threads_start_on_the_ranks_device():
    activated = []
    threads = CallbackThreads(lambda: activated.append("callbacks"))
    work = HethubWork(Operation(name="x", group="g", rank=0, explainer=None), [], threads)
    worker = Worker("test", lambda: activated.append("worker"))
    worker.submit(Job(run=lambda: activated.append("job"), work=work, count=lambda seconds: None)).wait()
    work.get_future().wait()
    assert activated[:2] == ["worker", "job"]


def stop_or_die(world, how):
    """Rank 3 is stopped or killed while staged operations of two groups are under way."""
    groups = [world.group([0, 1, 2, 3]), world.group([0, 1, 3])]
    meet(world)
    if world.rank == 3:
        os.kill(os.getpid(), how)
    works = [dist.all_reduce(torch.ones(200_000), group=group, async_op=True) for group in groups if group is not None]
    failed = []
    for work in works:
        with pytest.raises(RunFailed) as caught:
            work.wait()
        failed.append(str(caught.value))
    return failed


@pytest.mark.parametrize(("how", "said"), [(signal.SIGKILL, "is gone"), (signal.SIGSTOP, "has stopped")])
def test_faults_end_staged_operations_of_all_groups(how, said):
    connect = {"islands": [[0, 1], [2, 3]], "staged_ranks": [0, 1, 2, 3], "timeout_seconds": 5}
    outcomes = start_ranks(4, stop_or_die, how, connect=connect, timeout_seconds=60)
    for rank, outcome in enumerate(outcomes[:3]):
        assert outcome.value is not None, outcome.traceback
        assert len(outcome.value) == (1 if rank == 2 else 2)
        for message in outcome.value:
            assert re.search(f"all_reduce in group .* on rank {rank}.*rank 3 {said}", message), message
