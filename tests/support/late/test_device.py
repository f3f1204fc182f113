"""The late device shows what it is there to show, and nothing where the rules are kept."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hethub.communicator import torch_private
from hethub.kernels.device import Device
from tests.support.late import device as late
from tests.support.late import engine
from tests.support.late.tensor import HostRead
from tests.support.ranks import start_ranks, values

SEEDS = 16
SIZE = 1000


def add_on_another_stream(device: Device, seed: int, waits: bool, keeps: bool) -> bool:
    other = device.new_stream()
    made = torch.full((SIZE,), float(seed)).to(device.torch_device) * 2
    if waits:
        other.wait(device.current_stream().record())
    with other.active():
        added = made + 1
    if keeps:
        other.keep(made)
    del made
    torch.zeros(SIZE, device=device.torch_device)
    with other.active():
        return bool((added.cpu() == 2 * seed + 1).all())


def copy_to_the_host(device: Device, seed: int, waits: bool, keeps: bool) -> bool:
    host = device.host_buffer(4 * SIZE).view(torch.float32)
    host.copy_(torch.full((SIZE,), float(seed)).to(device.torch_device) + 1, non_blocking=True)
    if waits:
        device.current_stream().record().synchronize()
    return bool((host == seed + 1).all())


def count_right(rank: int, store: Any, do: Callable[..., bool], waits: bool, keeps: bool) -> int:
    device, right = late.install(), 0
    with torch.no_grad():
        for seed in range(SEEDS):
            late.reseed(seed)
            right += do(device, seed, waits, keeps)
            device.synchronize()
    return right


def host_reads(rank: int, store: Any) -> list[str]:
    device, refused = late.install(), []
    tensor = torch.ones(4).to(device.torch_device)
    for name, read in {
        "item": lambda: tensor[0].item(),
        "if": lambda: bool((tensor == 1).all()),
        "tolist": tensor.tolist,
        "numpy": tensor.numpy,
        "equal": lambda: torch.equal(tensor, tensor),
    }.items():
        try:
            read()
        except HostRead:
            refused.append(name)
    return refused


def launch_on_two_streams(rank: int, store: Any, alike: bool) -> bool:
    """Whether two collectives end that the ranks launch in one order, or in unlike ones."""
    device = late.install()
    if not alike:
        engine.STUCK_SECONDS = 2.0
    groups = [torch_private.create_nccl_group(dist.PrefixStore(str(n), store), rank, 2, 30.0) for n in range(2)]
    stream = device.new_stream()
    with torch.no_grad(), stream.active():
        part = torch.ones(2).to(device.torch_device)
        for number in (0, 1) if alike or rank == 0 else (1, 0):
            whole = torch.empty(4, device=device.torch_device)
            torch_private.native_all_gather(groups[number], whole, part)
    try:
        device.synchronize()
    except TimeoutError:
        return False
    return bool((whole.cpu() == 1).all())


def launch_beside_a_receive(rank: int, store: Any, settings: dict[str, str]) -> str:
    """What stands still where a kernel is launched while another stream waits for good, as for a peer that sends nothing."""
    os.environ.update(settings)
    engine.STUCK_SECONDS = 0.5
    device = late.install()
    ones, other = torch.ones(4).to(device.torch_device), device.new_stream()
    other.wait(engine.Point())
    try:
        doubled = ones * 2
        device.current_stream().record().synchronize()
    except TimeoutError as error:
        return str(error)
    return "" if doubled.near.sum() == 8 else "other values"


def right(do: Callable[..., bool], waits: bool, keeps: bool) -> int:
    (count,) = values(start_ranks(1, count_right, do, waits, keeps))
    assert isinstance(count, int)
    return count


def test_what_is_not_waited_for_is_not_there() -> None:
    assert right(add_on_another_stream, True, True) == SEEDS
    assert right(add_on_another_stream, False, True) < SEEDS
    assert right(copy_to_the_host, True, True) == SEEDS
    assert right(copy_to_the_host, False, True) < SEEDS


def test_what_is_not_kept_is_poisoned() -> None:
    assert right(add_on_another_stream, True, False) < SEEDS


def test_the_host_reads_copies_only() -> None:
    assert values(start_ranks(1, host_reads)) == [["item", "if", "tolist", "numpy", "equal"]]


@pytest.mark.parametrize("alike", [True, False])
def test_collectives_in_unlike_orders_never_end(alike: bool) -> None:
    assert values(start_ranks(2, launch_on_two_streams, alike)) == [alike] * 2


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"CUDA_MODULE_LOADING": "EAGER"}, ""),
        ({"CUDA_MODULE_LOADING": "LAZY"}, "deadlock: aten.mul.Tensor of torch.float32 is loaded once the device stands"),
        ({"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "2 stream(s) on a queue that stands at a wait"),
    ],
    ids=["neither", "lazy loading", "a shared queue"],
)  # fmt: skip
def test_what_holds_up_a_launch(settings: dict[str, str], told: str) -> None:
    (shown,) = values(start_ranks(1, launch_beside_a_receive, settings))
    assert isinstance(shown, str)
    assert told in shown
    assert bool(told) == bool(shown)
