"""The one device layer: everything that differs between a CPU, an NVIDIA and an AMD device is decided here.

Torch calls both CUDA and ROCm devices "cuda"; `vendor` tells them apart. Whatever a CPU has no use for (streams,
events, pinned memory) is a no-op there, so that callers are written once.
"""

import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Literal

import torch

from hethub.spec.errors import BadInput

Vendor = Literal["nvidia", "amd", "cpu"]

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process

VISIBLE_DEVICES = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")

# Streams that share a hardware queue wait for each other: behind a receive that waits for its peer, what the peer waits
# for would stand still. The drivers' defaults are 8 and 4 (AMD: of each priority); CUDA allows 32, and with 16 on AMD
# torchtitan measured slower steps than with 8 (pytorch/torchtitan 4032).
HARDWARE_QUEUES: dict[Vendor, tuple[str, int]] = {
    "nvidia": ("CUDA_DEVICE_MAX_CONNECTIONS", 32),
    "amd": ("GPU_MAX_HW_QUEUES", 8),
}


@dataclass(frozen=True, kw_only=True)
class Device:
    """The accelerator of one rank."""

    vendor: Vendor
    index: int = 0

    @property
    def is_gpu(self) -> bool:
        return self.vendor != "cpu"

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda", self.index) if self.is_gpu else torch.device("cpu")

    @property
    def native_library(self) -> str:
        """The library that joins this maker's devices, with the version that this build of torch carries; empty on a CPU."""
        if not self.is_gpu:
            return ""
        return f"{'RCCL' if self.vendor == 'amd' else 'NCCL'} {'.'.join(map(str, torch.cuda.nccl.version()))}"

    @property
    def name(self) -> str:
        """What the maker calls it, as torch reports it."""
        return torch.cuda.get_device_name(self.index) if self.is_gpu else "CPU"

    @property
    def identity(self) -> str | None:
        """What tells this device from every other, on any node; None on a CPU. The slot is named too: of AMD's,
        partitions of one card, and cards for consumers, may share a UUID."""
        if not self.is_gpu:
            return None
        found = torch.cuda.get_device_properties(self.index)
        slot = ":".join(f"{getattr(found, f'pci_{part}_id', 0):02x}" for part in ("domain", "bus", "device"))
        return f"{found.uuid} {slot}"

    def activate(self) -> None:
        """Makes this device the current one of the calling thread (a new thread starts on device 0)."""
        if self.is_gpu:
            torch.cuda.set_device(self.index)

    def synchronize(self) -> None:
        """Returns when everything submitted to the device is done."""
        if self.is_gpu:
            torch.cuda.synchronize(self.index)

    def new_stream(self) -> "Stream":
        return Stream(torch.cuda.Stream(self.index)) if self.is_gpu else Stream(None)

    def current_stream(self) -> "Stream":
        return Stream(torch.cuda.current_stream(self.index)) if self.is_gpu else Stream(None)

    def stream_pointer(self) -> int:
        """The current stream's handle, for a library that launches beside torch."""
        return int(torch.cuda.current_stream(self.index).cuda_stream) if self.is_gpu else 0

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """An uninitialised uint8 tensor in host memory, pinned where a device copies from it."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.is_gpu)

    def pin(self, memory: torch.Tensor) -> None:
        """Pins host memory that another allocator has given, for copies that need not wait."""
        if self.is_gpu:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE))

    def unpin(self, memory: torch.Tensor) -> None:
        """Before that memory goes."""
        if self.is_gpu:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))

    def memory_bytes(self) -> int | None:
        """The device's memory; None on a CPU, where it is no fixed property of the device."""
        return torch.cuda.get_device_properties(self.index).total_memory if self.is_gpu else None

    def compute_units(self) -> int | None:
        """The device's multiprocessors or compute units; None on a CPU."""
        return torch.cuda.get_device_properties(self.index).multi_processor_count if self.is_gpu else None

    def free_memory_bytes(self) -> int | None:
        """What this process can still allocate: free, or cached by its allocator; None on a CPU."""
        if not self.is_gpu:
            return None
        free, _ = torch.cuda.mem_get_info(self.index)
        return free + torch.cuda.memory_reserved(self.index) - torch.cuda.memory_allocated(self.index)

    def peak_memory_bytes(self) -> int | None:
        """The allocator's peak of reserved bytes since `release_memory`; None on a CPU (we count tensors there)."""
        return torch.cuda.max_memory_reserved(self.index) if self.is_gpu else None

    def release_memory(self) -> None:
        """Hands memory that nothing uses any more back to the device, and starts the peak anew.

        A trainer that is deleted goes with the next collection of cycles only, so one is made here.
        """
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.index)

    def supports(self, dtype: torch.dtype) -> bool:
        """Whether the device computes in `dtype` itself (V100 and T4 have no bfloat16)."""
        if self.is_gpu and dtype == torch.bfloat16:
            return torch.cuda.is_bf16_supported(including_emulation=False)
        return True


class Event:
    """A point in a stream's work that another stream or the host can wait for."""

    def __init__(self, event: "torch.cuda.Event | None") -> None:
        self._event = event

    def synchronize(self) -> None:
        """Blocks the calling thread, not the interpreter, until the point is reached."""
        if self._event is not None:
            self._event.synchronize()

    def is_done(self) -> bool:
        return self._event is None or self._event.query()


class Stream:
    """A queue of device work; on a CPU work is done when the call returns, so there is nothing to order."""

    def __init__(self, stream: "torch.cuda.Stream | None") -> None:
        self._stream = stream

    def record(self) -> Event:
        if self._stream is None:
            return Event(None)
        event = torch.cuda.Event(blocking=True)  # else a thread that waits for it spins on a core
        event.record(self._stream)
        return Event(event)

    def wait(self, event: Event) -> None:
        """What is submitted from here on starts after `event`; the host does not wait."""
        if self._stream is not None and event._event is not None:
            self._stream.wait_event(event._event)

    def keep(self, tensor: torch.Tensor) -> None:
        """Keeps the allocator from reusing `tensor` before this stream's present work is done."""
        if self._stream is not None and tensor.is_cuda:
            tensor.record_stream(self._stream)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Device work of the block goes to this stream."""
        if self._stream is None:
            yield
        else:
            with torch.cuda.stream(self._stream):
                yield


@dataclass(frozen=True)
class Stamp:
    """A point in time of a device's work: an event, and the one whose time is known; of a CPU, that time."""

    at: "float | torch.cuda.Event"
    anchor: "torch.cuda.Event | None" = None
    anchored_at: float = 0.0


class Clock:
    """When a device came to what it was given, in seconds of the host's monotonic clock, without waiting for it."""

    ANCHORED_SECONDS = 600.0  # events count milliseconds in fp32: farther apart, they tell less than 0.1 ms no more

    def __init__(self, device: Device) -> None:
        self._has_events = device.torch_device.type == "cuda"
        self._anchor: torch.cuda.Event | None = None
        self._anchored_at = -float("inf")

    def stamp(self) -> Stamp:
        """The point behind all work that the current stream has so far."""
        if not self._has_events:
            return Stamp(monotonic())
        if monotonic() > self._anchored_at + self.ANCHORED_SECONDS:
            self._anchor = self._event()
            self._anchor.synchronize()
            self._anchored_at = monotonic()
        return Stamp(self._event(), self._anchor, self._anchored_at)

    def seconds(self, stamp: Stamp) -> float:
        """When the device was there; the calling thread waits until it is."""
        if isinstance(stamp.at, float):
            return stamp.at
        stamp.at.synchronize()
        assert stamp.anchor is not None
        return stamp.anchored_at + stamp.anchor.elapsed_time(stamp.at) / 1e3

    def between(self, first: Stamp, last: Stamp) -> float:
        """Seconds from one point to another."""
        if isinstance(first.at, float) or isinstance(last.at, float):
            return self.seconds(last) - self.seconds(first)
        last.at.synchronize()
        return first.at.elapsed_time(last.at) / 1e3

    def _event(self) -> "torch.cuda.Event":
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record()
        return event


def is_gpu(where: torch.device) -> bool:
    """Whether tensors there lie in the memory of a maker's device."""
    return where.type == "cuda"


def detect_vendor() -> Vendor:
    """The maker whose devices this build of torch drives here; "cpu" where it finds none.

    Asks for hardware queues first: the driver looks at its environment once, when it is first called.
    """
    for variable, number in HARDWARE_QUEUES.values():
        os.environ.setdefault(variable, str(number))
    if not torch.cuda.is_available():
        return "cpu"
    return "amd" if torch.version.hip else "nvidia"


def all_devices() -> list[Device]:
    """Every device that torch sees here; none where ranks run on the CPU."""
    vendor = detect_vendor()
    return [] if vendor == "cpu" else [Device(vendor=vendor, index=index) for index in range(torch.cuda.device_count())]


def choose_device(local_rank: int, local_size: int, *, kind: Literal["auto", "cpu"] = "auto") -> Device:
    """The device of the rank `local_rank` of `local_size` on this node.

    One visible device is device 0, whatever the local rank (the launcher has already chosen); else the local rank's
    own. Raises BadInput where there are fewer devices than ranks.
    """
    vendor = detect_vendor() if kind == "auto" else "cpu"
    if vendor == "cpu":
        return Device(vendor="cpu")
    count = torch.cuda.device_count()
    if count == 1 and (local_size == 1 or visible_devices(os.environ) is not None):
        return Device(vendor=vendor)
    if local_rank < count:
        return Device(vendor=vendor, index=local_rank)
    raise BadInput(
        f"local rank {local_rank} of {local_size} has no device: torch sees {count} on this node"
        f" ({_describe_visible(os.environ)}). Start at most {count} ranks on this node, or make more devices visible."
    )


def visible_devices(environment: Mapping[str, str]) -> list[str] | None:
    """The entries of the first visible-devices variable that is set, or None."""
    for variable in VISIBLE_DEVICES:
        if variable in environment:
            return [entry for entry in environment[variable].split(",") if entry.strip()]
    return None


def _describe_visible(environment: Mapping[str, str]) -> str:
    given = [f"{variable}={environment[variable]}" for variable in VISIBLE_DEVICES if variable in environment]
    return ", ".join(given) or "no visible-devices variable is set"
