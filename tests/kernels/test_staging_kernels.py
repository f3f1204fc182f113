"""The staging kernels: the torch reference against arithmetic, and the GPU source itself, compiled and run on the host.

A C++ compiler stands in for the GPU: a few lines give the source threadIdx, __syncthreads and real threads, so that
the text NVRTC and hipRTC compile is executed and compared bit for bit with the reference.
"""

import contextlib
import ctypes
import functools
import shutil
import subprocess
import sys
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hethub.kernels.compiled import CompiledKernels
from hethub.kernels.device import Device
from hethub.kernels.reference import LARGEST, TorchKernels, num_scales
from hethub.kernels.sources import COMPILE_OPTIONS, NAMES, QUANTISED_BLOCK, SMALLEST_MAXIMUM, TEAM, source

KERNELS = TorchKernels()

SHIM = r"""
#include <barrier>
#include <cmath>
#include <deque>
#include <thread>
#include <vector>
struct dim3 { unsigned x = 1, y = 1, z = 1; };
thread_local dim3 threadIdx, blockIdx;
dim3 blockDim, gridDim;
std::deque<std::barrier<>> teams;
unsigned lanes[1024];
static inline unsigned from_lane(unsigned x, unsigned mask) {
    auto& team = teams[threadIdx.x / TEAM];
    lanes[threadIdx.x] = x;
    team.arrive_and_wait();
    unsigned theirs = lanes[threadIdx.x ^ mask];
    team.arrive_and_wait();
    return theirs;
}
#define FROM_LANE_XOR(x, mask) from_lane(x, mask)
#define __device__
#define __global__
"""

LAUNCH = r"""
template <class F> void on_blocks(unsigned blocks, unsigned rows, unsigned threads, F kernel) {
    blockDim = {threads, 1, 1}; gridDim = {blocks, rows, 1};
    for (unsigned y = 0; y < rows; y++) for (unsigned b = 0; b < blocks; b++) {
        teams.clear();
        for (unsigned t = 0; t < threads; t += TEAM) teams.emplace_back(TEAM);
        std::vector<std::thread> running;
        for (unsigned t = 0; t < threads; t++) running.emplace_back([=] {
            threadIdx = {t, 0, 0}; blockIdx = {b, y, 0}; kernel(); });
        for (auto& one : running) one.join();
    }
}
extern "C" {
void run_quantise_int8(u8* o, float* s, const float* x, u64 n) {
    on_blocks(2, 1, 2 * TEAM, [=] { quantise_int8(o, s, x, n); }); }
void run_quantise_fp8(u8* o, float* s, const float* x, u64 n) {
    on_blocks(2, 1, 2 * TEAM, [=] { quantise_fp8(o, s, x, n); }); }
void run_dequantise_int8(float* o, const float* s, const u8* x, u64 n) {
    on_blocks(3, 1, 2, [=] { dequantise_int8(o, s, x, n); }); }
void run_dequantise_fp8(float* o, const float* s, const u8* x, u64 n) {
    on_blocks(3, 1, 2, [=] { dequantise_fp8(o, s, x, n); }); }
void run_add_bf16(float* a, const u16* x, u64 n) { on_blocks(3, 1, 2, [=] { add_bf16(a, x, n); }); }
void run_add_f32(float* a, const float* x, u64 n) { on_blocks(3, 1, 2, [=] { add_f32(a, x, n); }); }
void run_add_f16(float* a, const u16* x, u64 n) { on_blocks(3, 1, 2, [=] { add_f16(a, x, n); }); }
void run_round_bf16(u16* o, const float* x, u64 n) { on_blocks(1, 1, 1, [=] { round_bf16_all(o, x, n); }); }
void run_round_f16(u16* o, const float* x, u64 n) { on_blocks(1, 1, 1, [=] { round_f16_all(o, x, n); }); }
void run_widen_f16(float* o, const u16* x, u64 n) { for (u64 i = 0; i < n; i++) o[i] = widen_f16(x[i]); }
void run_widen_bf16(float* o, const u16* x, u64 n) { for (u64 i = 0; i < n; i++) o[i] = widen_bf16(x[i]); }
void run_round_e4m3(u8* o, const float* x, u64 n) { for (u64 i = 0; i < n; i++) o[i] = round_to_e4m3(x[i]); }
void run_widen_e4m3(float* o, const u8* x, u64 n) { for (u64 i = 0; i < n; i++) o[i] = widen_e4m3(x[i]); }
void run_pack(u8* f, const u64* p, const u64* o, u32 c) { on_blocks(2, 2, 2, [=] { pack(f, p, o, c); }); }
void run_unpack(const u8* f, const u64* p, const u64* o, u32 c) { on_blocks(2, 2, 2, [=] { unpack(f, p, o, c); }); }
}
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The kernels' source as a host library."""
    if shutil.which("g++") is None:
        pytest.skip("needs a C++20 compiler (g++) to run the GPU source on the host")
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "kernels.cpp").write_text(f"#define TEAM {TEAM}\n" + SHIM + source() + LAUNCH)
    command = ["g++", "-std=c++20", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-pthread", "-o", "kernels.so"]
    command += ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]  # as a GPU does
    subprocess.run([*command, "kernels.cpp"], cwd=folder, check=True, timeout=240)
    return ctypes.CDLL(str(folder / "kernels.so"))


def call(function, *arguments):
    function(*(ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else ctypes.c_uint64(a) for a in arguments))


def same_bits(a, b):
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def awkward_floats():
    """Every exponent and sign with all short fractions, their neighbours, and the special values."""
    top = torch.arange(1 << 16, dtype=torch.int64) << 16
    bits = torch.cat([top, top + 1, top + 0x7FFF, top + 0x8000, top + 0x8001, top + 0x1000, top + 0xFFFF])
    return bits.to(torch.int32).view(torch.float32)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_rounding_and_widening_equal_torchs(compiled, name, dtype):
    values = awkward_floats()
    rounded = torch.empty(values.numel(), dtype=dtype)
    call(compiled[f"run_round_{name}"], rounded, values, values.numel())
    number = ~values.isnan()
    assert same_bits(rounded[number], values[number].to(dtype))
    assert rounded[~number].isnan().all()
    everything = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)
    everything = everything[~everything.isnan()].contiguous()
    wide = torch.empty(everything.numel())
    call(compiled[f"run_widen_{name}"], wide, everything, everything.numel())
    assert same_bits(wide, everything.float())


def test_e4m3_equals_torchs(compiled):
    values = awkward_floats()
    values = values[values.abs() <= 448]
    rounded = torch.empty(values.numel(), dtype=torch.uint8)
    call(compiled.run_round_e4m3, rounded, values, values.numel())
    assert torch.equal(rounded, values.to(torch.float8_e4m3fn).view(torch.uint8))
    everything = torch.arange(256).to(torch.uint8)
    wide = torch.empty(256)
    call(compiled.run_widen_e4m3, wide, everything, 256)
    expected = everything.view(torch.float8_e4m3fn).float()
    assert torch.equal(wide.isnan(), expected.isnan())
    assert same_bits(wide[~wide.isnan()], expected[~expected.isnan()])


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("size", [1, 255, 256, 257, 1000, 1300])
def test_quantising_on_the_device_equals_the_reference(compiled, dtype, size):
    generator = torch.Generator().manual_seed(size)
    values = torch.randn(size, generator=generator) * torch.logspace(-6, 6, size)
    values[size // 2] = 0.0
    if size > 600:
        values[300] = float("inf")
        values[:QUANTISED_BLOCK] = 0.0
    ours, scales = torch.empty(size, dtype=dtype), torch.empty(num_scales(size))
    name = "int8" if dtype == torch.int8 else "fp8"
    call(compiled[f"run_quantise_{name}"], ours, scales, values, size)
    expected, expected_scales = torch.empty(size, dtype=dtype), torch.empty(num_scales(size))
    KERNELS.quantise(values, expected, expected_scales)
    assert same_bits(ours, expected)
    assert torch.equal(scales.nan_to_num(nan=-1.0), expected_scales.nan_to_num(nan=-1.0))
    back, expected_back = torch.empty(size), torch.empty(size)
    call(compiled[f"run_dequantise_{name}"], back, scales, ours, size)
    KERNELS.dequantise(expected, expected_scales, expected_back)
    assert torch.equal(back.nan_to_num(nan=-1.0), expected_back.nan_to_num(nan=-1.0))


def test_a_block_is_divided_once():
    """As IEEE divides: torch multiplies a number by a tensor's reciprocal, which moves one value in a million."""
    for seed in (0, 10, 14):
        values = torch.randn(1 << 20, generator=torch.Generator().manual_seed(seed))
        ours, scales = torch.empty(values.numel(), dtype=torch.int8), torch.empty(num_scales(values.numel()))
        KERNELS.quantise(values, ours, scales)
        blocks = values.view(-1, QUANTISED_BLOCK).numpy()
        maximum = np.abs(blocks).max(axis=1)
        expected = np.rint(blocks * (np.float32(127) / maximum)[:, None]).astype(np.int8)
        assert np.array_equal(ours.numpy(), expected.ravel())
        assert np.array_equal(scales.numpy(), maximum / np.float32(127))


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_adding_on_the_device_equals_the_reference(compiled, name, dtype):
    part = torch.randn(1001).to(dtype)
    ours = torch.randn(1001)
    expected = ours.clone()
    call(compiled[f"run_add_{name}"], ours, part, 1001)
    KERNELS.add(expected, part)
    assert same_bits(ours, expected)


def test_packing_on_the_device_equals_the_reference(compiled):
    tensors = [torch.randn(7), torch.randn(3, 5), torch.randn(0), torch.randn(100)]
    flat, expected = torch.empty(122), torch.empty(122)
    places = torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64)
    offsets = torch.tensor([0, 28, 88, 88, 488], dtype=torch.int64)
    compiled.run_pack.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_uint32]
    compiled.run_pack(flat.data_ptr(), places.data_ptr(), offsets.data_ptr(), 4)
    KERNELS.pack(tensors, expected)
    assert same_bits(flat, expected)
    targets = [torch.empty_like(tensor) for tensor in tensors]
    KERNELS.unpack(flat, targets)
    assert all(torch.equal(a, b) for a, b in zip(targets, tensors, strict=True))


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 700),
    scale=st.floats(1e-20, 1e20),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from(list(LARGEST)),
)
def test_quantising_error_is_bounded_by_the_blocks_maximum(size, scale, seed, dtype):
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale
    quantised, scales, back = torch.empty(size, dtype=dtype), torch.empty(num_scales(size)), torch.empty(size)
    KERNELS.quantise(values, quantised, scales)
    KERNELS.dequantise(quantised, scales, back)
    for start in range(0, size, QUANTISED_BLOCK):
        block, restored = values[start : start + QUANTISED_BLOCK], back[start : start + QUANTISED_BLOCK]
        maximum = block.abs().max()
        # int8: half a step of maximum/127. e4m3 keeps 3 fraction bits: at most 1/16 of each value, or half its
        # smallest step, 2^-10 of maximum/448, for the smallest.
        step = maximum / 127 / 2 if dtype == torch.int8 else torch.maximum(block.abs() / 16, maximum / 448 / 1024)
        assert ((block - restored).abs() <= step * 1.001).all()


def test_overflow_is_not_hidden():
    values = torch.tensor([1.0, float("inf"), 2.0])
    quantised, scales, back = torch.empty(3, dtype=torch.int8), torch.empty(1), torch.empty(3)
    KERNELS.quantise(values, quantised, scales)
    KERNELS.dequantise(quantised, scales, back)
    assert back.isnan().all()


@pytest.mark.parametrize("dtype", LARGEST)
def test_blocks_that_all_but_vanish_become_zeros(compiled, dtype):
    edge = torch.full((QUANTISED_BLOCK,), SMALLEST_MAXIMUM)
    values = torch.cat([edge, -edge * (1 - 2**-24), edge * 0, torch.full((5,), 3.4e38)])
    name = "int8" if dtype == torch.int8 else "fp8"
    ours, scales, back = torch.empty(values.numel(), dtype=dtype), torch.empty(4), torch.empty(values.numel())
    call(compiled[f"run_quantise_{name}"], ours, scales, values, values.numel())
    call(compiled[f"run_dequantise_{name}"], back, scales, ours, values.numel())
    torch.testing.assert_close(back[:256], edge)
    assert (back[256:768] == 0).all()
    torch.testing.assert_close(back[768:], values[768:])
    expected, expected_scales = torch.empty_like(ours), torch.empty(4)
    KERNELS.quantise(values, expected, expected_scales)
    assert same_bits(ours, expected)
    assert same_bits(scales, expected_scales)


@pytest.mark.parametrize("shift", [0, 1, 2, 4])
def test_addresses_of_any_alignment_give_the_same_bits(compiled, shift):
    """Where addresses are not multiples of 16 bytes the kernels take narrower steps."""
    size = 1001
    values = torch.randn(size + shift)[shift:]
    scales, expected_scales = torch.empty(num_scales(size)), torch.empty(num_scales(size))
    ours = torch.empty(size + shift, dtype=torch.int8)[shift:]
    expected = torch.empty(size, dtype=torch.int8)
    call(compiled.run_quantise_int8, ours, scales, values, size)
    KERNELS.quantise(values, expected, expected_scales)
    assert same_bits(ours, expected)
    expected_back = torch.empty(size)
    KERNELS.dequantise(expected, expected_scales, expected_back)
    for back in (torch.empty(size), torch.empty(size + shift)[shift:]):
        call(compiled.run_dequantise_int8, back, scales, ours, size)
        assert same_bits(back, expected_back)
    half = torch.randn(size + shift).bfloat16()[shift:]
    total, expected_total = values.clone(), values.clone()
    call(compiled.run_add_bf16, total, half, size)
    KERNELS.add(expected_total, half)
    assert same_bits(total, expected_total)
    flat = torch.empty(2 * size, dtype=torch.bfloat16)
    places = torch.tensor([half.data_ptr(), half.data_ptr()], dtype=torch.int64)
    offsets = torch.tensor([0, 2 * size, 4 * size], dtype=torch.int64)
    compiled.run_pack.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_uint32]
    compiled.run_pack(flat.data_ptr(), places.data_ptr(), offsets.data_ptr(), 2)
    assert same_bits(flat, torch.cat([half, half]))


class HostAsDevice(Device):
    """A GPU whose memory is the host's; its pinned memory is counted."""

    pinned_bytes: ClassVar[list[int]] = []

    def host_buffer(self, num_bytes):
        self.pinned_bytes.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    @property
    def torch_device(self):
        return torch.device("cpu")

    def stream_pointer(self):
        return 0


class Cupy:
    """As much of CuPy as launches a kernel, over the source compiled for the host; checks what a launch is given."""

    def __init__(self, library):
        self.cuda = SimpleNamespace(
            Device=lambda index: contextlib.nullcontext(), ExternalStream=lambda pointer: contextlib.nullcontext()
        )
        self._library = library
        self.launched = []

    def RawModule(self, code, options):
        assert (code, options) == (source(), COMPILE_OPTIONS["nvidia"])
        return SimpleNamespace(get_function=lambda name: functools.partial(self._launch, name))

    def _launch(self, name, grid, threads, arguments):
        assert min(grid) >= 1, "a launch of no blocks is an error"
        assert len(grid) == 1 or grid[1] <= 65_535, "a launch of more is an error"
        assert threads[0] % TEAM == 0
        self.launched.append(name)
        *pointers, last = arguments
        assert last.itemsize == (4 if name in ("pack", "unpack") else 8)
        assert all(pointer.itemsize == 8 for pointer in pointers)
        count = ctypes.c_uint32 if name in ("pack", "unpack") else ctypes.c_uint64
        self._library[f"run_{name.removesuffix('_all')}"](
            *(ctypes.c_void_p(int(p)) for p in pointers), count(int(last))
        )


@pytest.fixture
def over_cupy(compiled, monkeypatch):
    cupy = Cupy(compiled)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return CompiledKernels(HostAsDevice(vendor="nvidia")), cupy


def test_every_kernel_is_launched_with_what_it_takes(over_cupy):
    kernels, cupy = over_cupy
    generator = torch.Generator().manual_seed(3)
    wide = torch.randn(1000, generator=generator)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        part, results = torch.randn(1000, generator=generator).to(dtype), []
        for each in (kernels, KERNELS):
            narrow, total = torch.empty(1000, dtype=dtype), wide.clone()
            each.cast(wide, narrow)
            each.add(total, part)
            results.append((narrow, total))
        assert all(same_bits(ours, theirs) for ours, theirs in zip(*results, strict=True))
    for dtype in LARGEST:
        results = []
        for each in (kernels, KERNELS):
            values, scales, back = torch.empty(1000, dtype=dtype), torch.empty(4), torch.empty(1000)
            each.quantise(wide, values, scales)
            each.dequantise(values, scales, back)
            results.append((values, scales, back))
        assert all(same_bits(ours, theirs) for ours, theirs in zip(*results, strict=True))
    for tensors in ([torch.randn(3, 5), torch.randn(7), torch.randn(0)], [torch.ones(1, dtype=torch.bfloat16)]):
        flat = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=tensors[0].dtype)
        targets = [torch.empty_like(tensor) for tensor in tensors]
        kernels.pack(tensors, flat)
        kernels.unpack(flat, targets)
        assert all(torch.equal(target, tensor) for target, tensor in zip(targets, tensors, strict=True))
    assert set(cupy.launched) == set(NAMES)


def test_where_packed_tensors_lie_is_copied_from_pinned_memory(over_cupy):
    kernels, _ = over_cupy
    kernels._device.pinned_bytes.clear()
    kernels.pack([torch.ones(3), torch.ones(2)], torch.empty(5))
    assert kernels._device.pinned_bytes == [8 * (3 + 2)]  # where each begins and the last ends, and two addresses


def test_more_tensors_than_a_launch_has_rows_are_packed(over_cupy):
    numbers, flat = torch.arange(66_000.0), torch.empty(66_000)
    over_cupy[0].pack(list(numbers.split(1)), flat)
    assert torch.equal(flat, numbers)


def test_a_type_that_no_kernel_knows_is_cast_by_torch(over_cupy):
    kernels, cupy = over_cupy
    values, out = torch.randn(9), torch.empty(9, dtype=torch.float8_e4m3fn)
    kernels.cast(values, out)
    assert same_bits(out, values.to(out.dtype))
    assert cupy.launched == []


def test_what_lies_on_the_host_is_left_to_torch(over_cupy):
    kernels, cupy = CompiledKernels(Device(vendor="nvidia")), over_cupy[1]
    wide, flat, values = torch.randn(300), torch.empty(300), torch.empty(300, dtype=torch.int8)
    kernels.pack([wide], flat)
    kernels.unpack(flat, [wide])
    kernels.cast(wide, wide.bfloat16())
    kernels.add(flat, wide.bfloat16())
    kernels.quantise(wide, values, torch.empty(2))
    kernels.dequantise(values, torch.ones(2), flat)
    assert cupy.launched == []


def test_nothing_to_do_launches_nothing(over_cupy):
    kernels, cupy = over_cupy
    nothing = torch.empty(0)
    kernels.pack([nothing], nothing)
    kernels.add(nothing, nothing)
    kernels.quantise(nothing, torch.empty(0, dtype=torch.int8), nothing)
    assert cupy.launched == []
