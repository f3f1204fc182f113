"""Copies between a device and pinned host memory, beside what PCI Express carries."""

from collections.abc import Iterator
from statistics import median

import torch

from hethub.kernels.device import Clock, Device, Stream
from hethub.runtime.parity.row import Row
from hethub.spec.accelerator import AcceleratorSpec

COPIED_BYTES, REPEATS = 256 << 20, 5
LEAST_SHARE = 0.7  # of the raw rate: headers and flow control take their part of it
# Of sixteen lanes, one direction, by generation: 8, 16, 32, 64 GT/s with 128b/130b (PCI Express Base Specification).
PCIE_GBYTES_PER_SECOND = {3: 15.75, 4: 31.5, 5: 63.0, 6: 121.0}


def check_staging(device: Device, accelerator: AcceleratorSpec) -> Iterator[Row]:
    """Rows for copies down, up, and both ways at once."""
    if not device.is_gpu:
        yield Row(what="staging", where=device.name, state="skipped", reason="a CPU's memory is the host's")
        return
    host = [device.host_buffer(COPIED_BYTES) for _ in range(2)]
    own = [torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=device.torch_device) for _ in range(2)]
    streams = [device.new_stream() for _ in range(2)]
    bound = PCIE_GBYTES_PER_SECOND.get(accelerator.pcie_generation or 0)
    for what, ways in (("copies to the host", (0,)), ("copies from the host", (1,)), ("copies both ways", (0, 1))):
        rate = _rate(device, streams, host, own, ways)
        share = None if bound is None else rate / bound
        slow = share is not None and share < LEAST_SHARE
        fails = slow and len(ways) == 1  # what a host carries both ways at once, no standard says
        yield Row(
            what=what, where=device.name, state="fail" if fails else "note" if share is None or slow else "pass",
            found=f"{rate:.3g} GB/s each way" + ("" if share is None else f", {share:.0%} of PCIe {accelerator.pcie_generation}"),
            reason="the catalogue has no PCIe generation of it" if share is None
            else f"at least {LEAST_SHARE:.0%} is expected; look at the slot's lanes, and where the process runs (NUMA)" if slow
            else "",
            figures={"gbytes_per_second": rate, **({} if share is None else {"share_of_pcie": share})},
        )  # fmt: skip


def _rate(
    device: Device, streams: list[Stream], host: list[torch.Tensor], own: list[torch.Tensor], ways: tuple[int, ...]
) -> float:
    """GB/s of the slower way, by events on the streams of the copies."""
    clock, seconds = Clock(device), list[float]()
    for _ in range(REPEATS):
        device.synchronize()
        stamps = []
        for way in ways:
            with streams[way].active():
                start = clock.stamp()
                target, source = (host[way], own[way]) if way == 0 else (own[way], host[way])
                target.copy_(source, non_blocking=True)
                stamps.append((start, clock.stamp()))
        seconds.append(max(clock.between(start, end) for start, end in stamps))
    return COPIED_BYTES / median(seconds) / 1e9
