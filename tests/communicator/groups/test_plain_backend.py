"""`init_process_group("hethub")` by itself, as any PyTorch program would call it."""

import gc
import os
import threading
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from hethub.communicator import torch_private
from hethub.communicator.groups import backend
from hethub.communicator.groups.backend import context_of
from hethub.kernels.device import Device
from hethub.spec.errors import BadInput, RunFailed
from tests.communicator.stores import Leaving
from tests.support.hosts.namespaces import ADDRESSES, namespaces, why_no_namespaces
from tests.support.ranks import start_ranks, values


def model_and_data(size):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)).double()
    return model, torch.randn(4 * size, 8, dtype=torch.float64), torch.randn(4 * size, 4, dtype=torch.float64)


def train(model, x, y, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def train_ddp(rank, store, size):
    dist.init_process_group("hethub", store=store, rank=rank, world_size=size)
    model, x, y = model_and_data(size)
    part = slice(4 * rank, 4 * rank + 4)
    parameters = train(DistributedDataParallel(model), x[part], y[part])
    dist.barrier()
    dist.destroy_process_group()
    return parameters


@pytest.mark.parametrize(
    ("islands", "staged"),
    [("0,1|2,3", ""), ("0,2|1,3", ""), ("0|1,2,3", ""), ("0,1,2,3", ""), ("0,1|2,3", "0,1,2,3"), ("0|1,2,3", "0")],
)
def test_ddp_over_islands_equals_one_process(islands, staged):
    """Also where some ranks stage their tensors as a device's."""
    environment = {"HETHUB_ISLANDS": islands, "HETHUB_STAGED_RANKS": staged}
    results = values(start_ranks(4, train_ddp, 4, environment=environment))
    expected = train(*model_and_data(4))
    for parameters in results:
        for ours, theirs in zip(parameters, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    for parameters in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(parameters, results[0], strict=True))


def make_current(rank, store):
    """Whether a rank's device is made the caller's, who goes on to DeviceMesh or FSDP2."""
    by = []

    class Card(Device):
        def activate(self):
            by.append(threading.current_thread())

    with mock.patch.object(backend, "choose_device", return_value=Card(vendor="cpu")):
        dist.init_process_group("hethub", store=store, rank=rank, world_size=2)
    is_current = threading.current_thread() in by
    dist.destroy_process_group()
    return is_current


def test_a_rank_s_device_is_current_in_its_program():
    """torch's meshes set it only where nobody has used a device before, which making the group does: all were on device 0."""
    assert values(start_ranks(2, make_current)) == [True, True]


def bind_a_device(rank, store):
    """What works in a world whose ranks named their device when it was made; torch is told that there is one."""
    device = torch.device("cuda", rank)
    with mock.patch.multiple(
        "torch.accelerator",
        current_accelerator=mock.Mock(return_value=torch.device("cuda")),
        device_count=mock.Mock(return_value=2),
    ):
        dist.init_process_group("hethub", store=store, rank=rank, world_size=2, device_id=device)
    found = [None, None]
    dist.all_gather_object(found, rank)
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=dist.new_group([0, 1]))
    dist.barrier()
    mesh = init_device_mesh("cpu", (2,))
    dist.all_reduce(tensor, group=mesh.get_group())
    dist.destroy_process_group()
    return found, tensor.tolist()


def test_ranks_may_name_their_device():
    outcomes = start_ranks(2, bind_a_device, environment={"HETHUB_ISLANDS": "0|1"}, timeout_seconds=60)
    assert values(outcomes) == [([0, 1], [4.0] * 3)] * 2


def on_two_hosts(rank, store):
    """Where a rank takes itself to be, when ranks 0 and 2 are on one host and rank 1 is on another."""
    with mock.patch.object(backend, "host_identity", mock.Mock(return_value=f"host {rank % 2}")):
        dist.init_process_group("hethub", store=store, rank=rank, world_size=3)
    meeting = dist.group.WORLD.context.rendezvous
    dist.destroy_process_group()
    return meeting.local_rank, meeting.local_size, meeting.address


def test_without_a_launchers_word_ranks_find_out_who_shares_a_host():
    environment = {"HETHUB_ISLANDS": "0|1|2", "HETHUB_NETWORK": "127.0.0.0/8"}
    found = values(start_ranks(3, on_two_hosts, environment=environment, timeout_seconds=60))
    assert found == [(0, 2, "127.0.0.1"), (0, 1, "127.0.0.1"), (1, 2, "127.0.0.1")]


def sum_over_two_hosts(rank, store, found):
    """Where a rank takes itself to be, and a sum, with two ranks on the first host and one on the second."""
    found.enter(rank // 2)
    dist.init_process_group("hethub", store=store, rank=rank, world_size=3)
    tensor = torch.full((200_000,), float(rank))
    dist.all_reduce(tensor)
    meeting = context_of(dist.group.WORLD).rendezvous
    dist.barrier()
    dist.destroy_process_group()
    return meeting.local_rank, meeting.local_size, meeting.address, tensor[0].item()


def test_ranks_of_real_hosts_meet_without_a_launchers_word():
    if (reason := why_no_namespaces()) is not None:
        pytest.skip(f"two hosts on one machine: {reason}")
    with namespaces(f"hethub-plain-{os.getpid()}") as found:
        environment = {"HETHUB_NETWORK": "10.203.0.0/24"}
        outcomes = start_ranks(3, sum_over_two_hosts, found, environment=environment, timeout_seconds=40)
    near, far = ADDRESSES
    assert values(outcomes) == [(0, 2, near, 3.0), (1, 2, near, 3.0), (0, 1, far, 3.0)]


def test_several_hosts_need_a_network_that_joins_them():
    """The host's name is made to resolve to loopback, as it often does."""
    for outcome in start_ranks(3, without_a_network, environment={"HETHUB_ISLANDS": "0|1|2"}, timeout_seconds=60):
        assert "HETHUB_NETWORK" in outcome.error[1], outcome


def without_a_network(rank, store):
    with mock.patch("hethub.spec.network.socket.gethostname", mock.Mock(return_value="localhost")):
        on_two_hosts(rank, store)


def meet_again(rank, store):
    """Sums of worlds that follow each other in one store, as torchrun's ranks have it; they leave at unlike times."""
    sums = []
    for _ in range(3):
        dist.init_process_group("hethub", store=store, rank=rank, world_size=3)
        tensor = torch.ones(3)
        for group in (None, dist.new_group([0, 2]), dist.new_group([0, 1, 2])):
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.all_reduce(tensor, group=group)
        time.sleep(0.2 * rank)
        dist.destroy_process_group()
        sums.append(tensor[0].item())
    return sums


@pytest.mark.parametrize("islands", ["0,2|1", "0,1,2"])
def test_a_process_group_can_be_made_anew_in_the_store_of_the_last_one(islands):
    outcomes = start_ranks(3, meet_again, environment={"HETHUB_ISLANDS": islands}, timeout_seconds=60)
    assert values(outcomes) == [[15.0] * 3] * 3


def leave_at_once(rank, store):
    """Rank 0, which serves the store, ends as soon as it may; rank 1 is slow with what it has still to do there."""
    if rank == 0:
        served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        store.set("port", str(served.port))
    else:
        served = dist.TCPStore("127.0.0.1", int(store.get("port")), is_master=False)
        delete = torch_private.delete_when_read
        torch_private.delete_when_read = lambda *those: (time.sleep(0.3), delete(*those))
    dist.init_process_group("hethub", store=served, rank=rank, world_size=2)
    dist.destroy_process_group()


@pytest.mark.parametrize("islands", ["0|1", "0,1"])
def test_the_rank_that_serves_the_store_may_leave_at_once(islands):
    outcomes = start_ranks(2, leave_at_once, environment={"HETHUB_ISLANDS": islands}, timeout_seconds=60)
    assert values(outcomes) == [None, None]  # neither failed


def refuse_islands(rank, store):
    with pytest.raises(BadInput) as refused:
        dist.init_process_group("hethub", store=store, rank=rank, world_size=2)
    return str(refused.value)


def test_wrong_islands_are_refused():
    for message in values(start_ranks(2, refuse_islands, environment={"HETHUB_ISLANDS": "0,1|2"})):
        assert "ranks 0 to 1 exactly once" in message


def name_a_network_on(rank, store, where):
    """What a rank hears of a network in which one of them has no address, and for how long it has waited."""
    os.environ["HETHUB_NETWORK"] = "203.0.113.0/24" if rank == where else "127.0.0.0/8"
    begun = time.monotonic()
    with pytest.raises(BadInput) as refused:
        dist.init_process_group("hethub", store=store, rank=rank, world_size=3)
    return str(refused.value), time.monotonic() - begun


@pytest.mark.parametrize("where", [0, 2])
def test_what_is_wrong_on_one_rank_is_said_on_all_of_them(where):
    """The others would wait for it for the group's timeout, which is half an hour if the program names none."""
    for rank, (message, seconds) in enumerate(values(start_ranks(3, name_a_network_on, where, timeout_seconds=60))):
        assert "has no address in the network 203.0.113.0/24" in message
        assert message.startswith(f"rank {where} (") or rank == where
        assert seconds < 15


def fail_while_connecting(rank, store, error):
    """What a rank hears of one that fails, or is gone, when all others wait for it; and for how long it has waited."""

    def fail(*_):
        if error is None:
            os._exit(9)
        raise error

    begun = time.monotonic()
    with (
        mock.patch.object(
            torch_private, "require_descriptors", fail if rank == 1 else torch_private.require_descriptors
        ),
        pytest.raises(RunFailed) as failed,
    ):
        dist.init_process_group("hethub", store=store, rank=rank, world_size=3)
    return str(failed.value), time.monotonic() - begun


@pytest.mark.parametrize(("error", "said"), [
    (None, "is gone"),
    (OSError("no descriptors"), "failed: OSError: no descriptors"),
    (RuntimeError("Connect timeout"), "failed: RuntimeError: Connect timeout"),  # as Gloo says it
])  # fmt: skip
def test_a_rank_that_fails_while_the_ranks_connect_is_named_at_once(error, said):
    outcomes = start_ranks(3, fail_while_connecting, error, timeout_seconds=60)
    for outcome in (outcomes[0], outcomes[2]):
        message, seconds = outcome.value
        assert f"rank 1 {said}" in message
        assert seconds < 15


def connect_without_one(rank, store):
    connect = torch_private.create_gloo_group
    if rank == 1:
        torch_private.create_gloo_group = lambda store, *more: connect(Leaving(store, lambda: os._exit(9)), *more)
    with pytest.raises(RunFailed) as failed:
        dist.init_process_group("hethub", store=store, rank=rank, world_size=3)
    return str(failed.value)


def make_a_group_without_one(rank, store):
    dist.init_process_group("hethub", store=store, rank=rank, world_size=3)
    if rank == 1:
        os._exit(9)
    with pytest.raises(RunFailed) as failed:
        dist.new_group([0, 1, 2])
    return str(failed.value)


@pytest.mark.parametrize("function", [connect_without_one, make_a_group_without_one])
def test_a_rank_that_is_gone_when_gloo_connects_to_it_is_named(function):
    """Gloo waited five times the group's timeout, half an hour by default."""
    outcomes = start_ranks(3, function, environment={"HETHUB_ISLANDS": "0,2|1"}, timeout_seconds=60)
    assert ["rank 1 is gone" in outcomes[rank].value for rank in (0, 2)] == [True, True]


def groups_of_one_name(rank, store):
    """Sums in groups without a common member, which torch names alike: it counts the groups that this rank has made."""
    dist.init_process_group("hethub", store=store, rank=rank, world_size=4)
    sums = []
    for members in ([rank], [rank % 2, rank % 2 + 2], [rank]):
        group = dist.new_group(members)
        tensor = torch.tensor([10.0**rank])
        dist.all_reduce(tensor, group=group)
        sums.append(tensor.item())
        names = [None] * 4
        dist.all_gather_object(names, group.group_name)
        assert len(set(names)) == 1
    dist.destroy_process_group()
    return sums


@pytest.mark.parametrize("islands", ["0,1|2,3", "0,2|1,3"])
def test_groups_that_torch_names_alike_do_not_meet(islands):
    outcomes = start_ranks(4, groups_of_one_name, environment={"HETHUB_ISLANDS": islands}, timeout_seconds=60)
    assert values(outcomes) == [[1, 101, 1], [10, 1010, 10], [100, 101, 100], [1000, 1010, 1000]]


def sums_of_staged_groups_of_one_name(rank, store):
    """A sum over both islands in each of two groups, each with two ranks of the first."""
    dist.init_process_group("hethub", store=store, rank=rank, world_size=6)
    group = dist.new_group([0, 1, 4] if rank in (0, 1, 4) else [2, 3, 5])
    tensor = torch.full((100_000,), 10.0**rank)
    dist.all_reduce(tensor, group=group)
    dist.destroy_process_group()
    return group.group_name, tensor[0].item()


def test_island_libraries_of_groups_that_torch_names_alike_do_not_meet():
    """The ranks of the first island have the places 0 and 1 in both groups."""
    environment = {"HETHUB_ISLANDS": "0,1,2,3|4,5", "HETHUB_STAGED_RANKS": "0,1,2,3,4,5"}
    outcomes = start_ranks(6, sums_of_staged_groups_of_one_name, environment=environment, timeout_seconds=30)
    assert values(outcomes) == [("1", 10011.0 if rank in (0, 1, 4) else 101100.0) for rank in range(6)]


def waiting_in_a_group_made_anew(rank, store):
    """How a receive ends in a group that was made anew before the last one of its name was no more, when rank 2 ends."""
    dist.init_process_group("hethub", store=store, rank=rank, world_size=3)
    if rank == 2:
        dist.barrier()
        os._exit(3)
    old = dist.new_group([0, 1], use_local_synchronization=True)
    dist.destroy_process_group(old)
    new = dist.new_group([0, 1], use_local_synchronization=True)
    assert new.group_name == old.group_name
    del old
    gc.collect()
    dist.barrier()
    with pytest.raises(RuntimeError) as ended:
        dist.recv(torch.empty(1), 1 - rank, group=new)
    return str(ended.value)


def test_a_group_made_anew_under_its_name_ends_with_the_world():
    outcomes = start_ranks(3, waiting_in_a_group_made_anew, environment={"HETHUB_ISLANDS": "0,1|2"}, timeout_seconds=60)
    for rank in (0, 1):  # it gives up by itself, or feels that the other one has
        assert "pair closure" in outcomes[rank].value or "by peer" in outcomes[rank].value


def groups_made_anew_at_once(rank, store):
    """Sums in groups of one name, each made as soon as this rank has destroyed the one before; rank 1 is late to delete
    the addresses that both have read."""
    dist.init_process_group("hethub", store=store, rank=rank, world_size=3)
    delete, sums = torch_private.delete_when_read, []
    if rank == 1:
        torch_private.delete_when_read = lambda *read: (time.sleep(0.3), delete(*read))
    for number in range(4 if rank < 2 else 0):
        group = dist.new_group([0, 1], use_local_synchronization=True)
        if number % 2:
            tensor = torch.tensor([10.0 * rank + number])
            dist.all_reduce(tensor, group=group)
            sums.append(tensor.item())
        dist.destroy_process_group(group)
    dist.barrier()
    dist.destroy_process_group()
    return sums


@pytest.mark.parametrize("islands", ["0,1|2", "0|1,2"])
def test_a_group_may_be_made_anew_before_others_have_left_the_last(islands):
    outcomes = start_ranks(3, groups_made_anew_at_once, environment={"HETHUB_ISLANDS": islands}, timeout_seconds=60)
    assert values(outcomes) == [[12.0, 16.0]] * 2 + [[]]


def leave_before_a_sum_is_there(rank, store):
    """Rank 1 comes to the sum two seconds after rank 0 has asked to leave."""
    dist.init_process_group("hethub", store=store, rank=rank, world_size=2)
    tensor = torch.ones(10)
    if rank == 1:
        store.wait(["begun"])
        time.sleep(2)
    work = dist.all_reduce(tensor, async_op=True)
    store.set("begun", "")
    dist.destroy_process_group()
    work.wait()
    return tensor[0].item()


@pytest.mark.parametrize("islands", ["0,1", "0|1"])
def test_what_is_under_way_is_ended_before_a_rank_leaves(islands):
    """As over plain Gloo: it was cut short after a second, on both ranks."""
    outcomes = start_ranks(2, leave_before_a_sum_is_there, timeout_seconds=60, environment={"HETHUB_ISLANDS": islands})
    assert values(outcomes) == [2.0, 2.0]
