"""Bytes per second of each staging kernel, beside the device's own copy."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from hethub.kernels.device import Device
from hethub.kernels.reference import TorchKernels, num_scales

_CALLS = 5
_NUM_SCATTERED = 300


@dataclass(frozen=True, kw_only=True)
class Rate:
    """What one kernel reads and writes per second, and that over what a plain copy does."""

    kernel: str
    bytes_per_second: float
    over_copy: float


def measure(kernels: TorchKernels, device: Device, num_elements: int, repeats: int) -> list[Rate]:
    """The rate of every kernel on `num_elements` fp32 elements, and of the copy itself first.

    Medians of `repeats` interleaved rounds; a copy reads and writes every byte, so its rate is twice its size a second.
    """
    cases = _cases(kernels, device.torch_device, num_elements)
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for repeat in range(repeats + 1):
        for name, (call, _) in cases.items():
            elapsed = _timed(call, device)
            if repeat:  # the first round compiles and warms up
                seconds[name].append(elapsed)
    rates = {name: num_bytes / statistics.median(seconds[name]) for name, (_, num_bytes) in cases.items()}
    return [Rate(kernel=name, bytes_per_second=rate, over_copy=rate / rates["copy"]) for name, rate in rates.items()]


def _timed(call: Callable[[], object], device: Device) -> float:
    """Seconds of one call, averaged over a few in a row."""
    device.synchronize()
    start = time.perf_counter()
    for _ in range(_CALLS):
        call()
    device.synchronize()
    return (time.perf_counter() - start) / _CALLS


def _cases(
    kernels: TorchKernels, where: torch.device, num_elements: int
) -> dict[str, tuple[Callable[[], object], int]]:
    """Per kernel, a call and the bytes that it reads and writes."""
    wide, other = torch.randn(num_elements, device=where), torch.zeros(num_elements, device=where)
    cases: dict[str, tuple[Callable[[], object], int]] = {"copy": (partial(other.copy_, wide), 8 * num_elements)}
    pieces = [piece.clone() for piece in wide.tensor_split(_NUM_SCATTERED)]
    cases["pack"] = (partial(kernels.pack, pieces, other), 8 * num_elements)
    cases["unpack"] = (partial(kernels.unpack, other, pieces), 8 * num_elements)
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        narrow = wide.to(dtype)
        cases[f"cast fp32 to {name}"] = (partial(kernels.cast, wide, narrow), 6 * num_elements)
        cases[f"cast {name} to fp32"] = (partial(kernels.cast, narrow, other), 6 * num_elements)
        cases[f"add {name} to fp32"] = (partial(kernels.add, other, narrow), 10 * num_elements)
    cases["add fp32"] = (partial(kernels.add, other, wide), 12 * num_elements)
    scales = torch.empty(num_scales(num_elements), device=where)
    for name, dtype in (("int8", torch.int8), ("fp8", torch.float8_e4m3fn)):
        values, moved = torch.empty(num_elements, dtype=dtype, device=where), 5 * num_elements + 4 * scales.numel()
        kernels.quantise(wide, values, scales)
        cases[f"quantise {name}"] = (partial(kernels.quantise, wide, values, scales), moved)
        cases[f"dequantise {name}"] = (partial(kernels.dequantise, values, scales, other), moved)
    return cases
