"""Host memory is given back when nothing uses it any more, as the kernel sees it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hethub.kernels.device import Device
from hethub.runtime.checkpoint.elements import snapshot
from hethub.runtime.memory.accounting import MemoryMeter
from hethub.runtime.memory.activation_offload import OffloadedLayer
from hethub.runtime.memory.allocator import map_large_blocks, return_free_pages
from hethub.runtime.memory.host_arena import HostArena
from tests.support.layouts import Case, build_trainer, replica, stage
from tests.support.ranks import run_ranks

MB = 2**20
CASE = Case(name="alone", stages=[stage((0, 4), replica([0], 8, 2))], precision="fp32")


def anonymous_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


def kept_by_malloc(world: Any, mapped: bool) -> int:
    """What a process still holds of blocks that came and went beside small ones, as layers' weights do."""
    if mapped:
        map_large_blocks()
    torch.ones(24 * MB, dtype=torch.uint8)  # glibc's threshold follows the largest block freed
    before, small = anonymous_bytes(), []
    for size in range(4, 16, 2):  # none fits into the hole that the one before left
        block = torch.ones(size * MB, dtype=torch.uint8)
        small.append(torch.ones(64 * 1024, dtype=torch.uint8))
        del block
    return anonymous_bytes() - before


@pytest.mark.parametrize(("mapped", "least", "most"), [(True, 0, 2 * MB), (False, 20 * MB, 128 * MB)])
def test_what_comes_and_goes_leaves_no_holes(mapped: bool, least: int, most: int) -> None:
    (kept,) = run_ranks(1, kept_by_malloc, mapped)
    assert least <= kept <= most


def small_blocks(world: Any) -> tuple[int, int]:
    """What a process still holds of blocks below 1 MiB, freed below one that stays, before and after their pages go."""
    map_large_blocks()
    before, blocks = anonymous_bytes(), [torch.ones(256 * 1024, dtype=torch.uint8) for _ in range(128)]
    del blocks[:-1]
    kept = anonymous_bytes() - before
    return_free_pages()
    return kept, anonymous_bytes() - before


def test_pages_of_freed_small_blocks_can_be_returned() -> None:
    """Activations of short sequences that went to the host leave such holes."""
    ((kept, left),) = run_ranks(1, small_blocks)
    assert kept > 24 * MB
    assert left < 2 * MB


def offloaded_blocks(world: Any) -> tuple[int, int]:
    """What a process still holds on the device's side of two layers' small tensors: when they have left, and of one that
    was back when the other comes."""
    map_large_blocks()
    arena, meter, layers = HostArena(world.device), MemoryMeter([]), []
    before, above = anonymous_bytes(), []
    for number in (64, 1):
        layer = OffloadedLayer(arena, meter)
        packed = [layer.pack(torch.ones(64 * 1024)) for _ in range(number)]
        above.append(torch.ones(64 * 1024))
        layer.end()
        layers.append((layer, packed))
    left = anonymous_bytes() - before
    (layer, packed), (other, _) = layers
    assert all(bool((layer.unpack(each) == 1).all()) for each in packed)
    above.append(torch.ones(64 * 1024))
    del layer
    del layers[0]
    other.prefetch()
    return left, anonymous_bytes() - before


def test_what_is_offloaded_leaves_no_holes_on_the_device_s_side() -> None:
    """Of 16 MiB each time, below a block that stays; on a CPU that side is the process's own heap."""
    ((left, back),) = run_ranks(1, offloaded_blocks)
    assert left < 3 * MB
    assert back < 3 * MB


def test_of_memory_that_is_given_back_nothing_is_kept() -> None:
    """Each microbatch's activations have buffers of their own: what told when each was copied to grew with the run."""
    arena = HostArena(Device(vendor="cpu"))
    for _ in range(5):
        host = arena.empty(4, torch.float32)
        arena.store(host, torch.ones(4))
        assert arena.live_bytes == 16
        assert len(arena._last) == 1
        del host
    assert (arena.live_bytes, arena.peak_bytes, arena._last) == (0, 16, {})


def copies_of_a_checkpoint(world: Any) -> list[bool]:
    """Whether each piece that a checkpoint is written from has a storage of its own."""
    pieces = snapshot(build_trainer(world, CASE).optimizer, world.device)
    return [piece.values.untyped_storage().nbytes() == piece.values.nbytes for piece in pieces]


def test_pieces_of_a_checkpoint_have_storages_of_their_own() -> None:
    """DCP copies what is part of a larger storage, and keeps the copies until all is written."""
    (alone,) = run_ranks(1, copies_of_a_checkpoint)
    assert len(alone) > 3
    assert all(alone)
