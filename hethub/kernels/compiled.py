"""The staging kernels on a GPU through CuPy, the same for CUDA and ROCm.

Results equal `TorchKernels` bit for bit, but on AMD, where CuPy has fp32 denormals flushed: torch keeps them.
"""

import importlib.util
import logging
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy
import torch

from hethub.kernels.device import Device
from hethub.kernels.reference import TorchKernels
from hethub.kernels.sources import COMPILE_OPTIONS, NAMES, THREADS_PER_BLOCK, WORDS_PER_THREAD, num_blocks, source

_log = logging.getLogger(__name__)

_MAX_BLOCKS, _MAX_ROWS = 8192, 65_535
_BYTES_PER_THREAD = 16 * WORDS_PER_THREAD
_SUFFIX = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
_QUANTISED = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}


def kernels_for(device: Device) -> TorchKernels:
    """The fastest kernels this rank can run: compiled where it has a GPU and a CuPy that works, torch's own otherwise."""
    if device.is_gpu and importlib.util.find_spec("cupy") is not None:
        try:
            return CompiledKernels(device)
        except Exception as error:  # noqa: BLE001  whatever is wrong with it: a build for another CUDA, no compiler
            _log.warning("CuPy does not work here, so torch's own kernels stage tensors: %s", error)
    return TorchKernels()


def hip_runtimes(maps: Path = Path("/proc/self/maps")) -> set[str]:
    """The HIP runtimes that this process has loaded: torch's wheel brings one, and CuPy's takes the machine's. A stream is an
    object of the runtime that has made it."""
    paths = {line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines()}
    return {path for path in paths if Path(path).name.startswith("libamdhip64.so")}


class CompiledKernels(TorchKernels):
    """Runs on the calling thread's current torch stream; host tensors take the torch path."""

    name = "cupy"

    def __init__(self, device: Device) -> None:
        import cupy

        if len(runtimes := hip_runtimes()) > 1:
            raise RuntimeError(
                f"HIP runtimes beside each other do not know each other's streams: {', '.join(sorted(runtimes))}"
            )
        self._cupy = cupy
        self._device = device
        with cupy.cuda.Device(device.index):
            module = cupy.RawModule(code=source(), options=COMPILE_OPTIONS[device.vendor])
            self._functions = {name: module.get_function(name) for name in NAMES}

    def pack(self, tensors: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
        if not self._holds(flat):
            return super().pack(tensors, flat)
        return self._move("pack", tensors, flat)

    def unpack(self, flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        if not self._holds(flat):
            return super().unpack(flat, tensors)
        return self._move("unpack", tensors, flat)

    def add(self, total: torch.Tensor, part: torch.Tensor) -> None:
        if not self._holds(total):
            return super().add(total, part)
        return self._launch(f"add_{_SUFFIX[part.dtype]}", total.numel(), total, part)

    def cast(self, source: torch.Tensor, out: torch.Tensor) -> None:
        if not self._holds(out) or source.dtype == out.dtype or out.dtype not in _SUFFIX:
            return super().cast(source, out)
        return self._launch(f"round_{_SUFFIX[out.dtype]}_all", out.numel(), out, source)

    def quantise(self, source: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> None:
        if not self._holds(source):
            return super().quantise(source, values, scales)
        name = f"quantise_{_QUANTISED[values.dtype]}"
        return self._launch(name, source.numel(), values, scales, source)

    def dequantise(self, values: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        if not self._holds(out):
            return super().dequantise(values, scales, out)
        name = f"dequantise_{_QUANTISED[values.dtype]}"
        return self._launch(name, out.numel(), out, scales, values)

    def _holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies on this rank's device."""
        return tensor.device == self._device.torch_device

    def _launch(self, name: str, num_elements: int, *arguments: Any) -> None:
        if num_elements == 0:
            return
        grid = (min(num_blocks(num_elements), _MAX_BLOCKS),)
        self._run(name, grid, (*arguments, numpy.uint64(num_elements)))

    def _move(self, name: str, tensors: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
        sizes = [tensor.numel() * tensor.itemsize for tensor in tensors]
        if not any(sizes):
            return
        numbers = self._on_device([*accumulate(sizes, initial=0), *(tensor.data_ptr() for tensor in tensors)])
        offsets, places = numbers.tensor_split([len(sizes) + 1])
        num_threads = -(-max(sizes) // _BYTES_PER_THREAD)
        grid = (min(-(-num_threads // THREADS_PER_BLOCK), _MAX_BLOCKS), min(len(tensors), _MAX_ROWS))
        self._run(name, grid, (flat, places, offsets, numpy.uint32(len(tensors))))

    def _on_device(self, numbers: Sequence[int]) -> torch.Tensor:
        """On their way there, int64: from pinned memory, or the host would wait for the copy."""
        host = self._device.host_buffer(8 * len(numbers)).view(torch.int64)
        host.copy_(torch.tensor(numbers, dtype=torch.int64))
        return host.to(self._device.torch_device, non_blocking=True)

    def _run(self, name: str, grid: tuple[int, ...], arguments: Sequence[Any]) -> None:
        """Launches on torch's current stream; the caching allocator keeps what the arguments hold until then."""
        passed = [numpy.uint64(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in arguments]
        stream = self._cupy.cuda.ExternalStream(self._device.stream_pointer())
        with self._cupy.cuda.Device(self._device.index), stream:
            self._functions[name](grid, (THREADS_PER_BLOCK,), tuple(passed))
