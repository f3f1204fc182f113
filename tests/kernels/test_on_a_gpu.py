"""The kernels on a real device: the host's bits where the arithmetic is the host's, and bytes per second beside the device's own copy."""

import pytest
import torch

from hethub.kernels.compiled import kernels_for
from hethub.kernels.device import Device, choose_device
from hethub.kernels.reference import LARGEST, TorchKernels, num_scales
from tests.kernels.kernel_rates import measure

KERNELS = TorchKernels()
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")


def same_bits(a, b):
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.gpu
@on_a_gpu
def test_torchs_kernels_on_the_device_are_the_hosts():
    """The path of a rank without CuPy. Tensors are divided by tensors: by a number torch multiplies by its reciprocal."""
    values = torch.randn(100_003) * torch.logspace(-3, 3, 100_003)
    for dtype in LARGEST:
        results = []
        for data in (values, values.cuda()):
            quantised = torch.empty(data.numel(), dtype=dtype, device=data.device)
            scales, back = torch.empty(num_scales(data.numel()), device=data.device), torch.empty_like(data)
            KERNELS.quantise(data, quantised, scales)
            KERNELS.dequantise(quantised, scales, back)
            results.append((quantised.cpu(), scales.cpu(), back.cpu()))
        assert all(same_bits(*pair) for pair in zip(*results, strict=True))
    total, part = values.cuda(), values.bfloat16()
    KERNELS.add(total, part.cuda())
    KERNELS.add(values, part)
    assert same_bits(total.cpu(), values)


@pytest.mark.gpu
@on_a_gpu
def test_compiled_kernels_equal_the_reference_on_the_device():
    pytest.importorskip("cupy", reason="pip install 'hethub[nvidia]' or 'hethub[amd]'")
    kernels = kernels_for(choose_device(0, 1))
    assert kernels.name == "cupy"
    values = torch.randn(100_003) * torch.logspace(-3, 3, 100_003)
    on_device = values.cuda()
    for dtype in LARGEST:
        pairs = []
        for each, data in ((KERNELS, values), (kernels, on_device)):
            quantised = torch.empty(data.numel(), dtype=dtype, device=data.device)
            scales = torch.empty(num_scales(data.numel()), device=data.device)
            back = torch.empty_like(data)
            each.quantise(data, quantised, scales)
            each.dequantise(quantised, scales, back)
            pairs.append((quantised.cpu(), back.cpu()))
        assert same_bits(pairs[0][0], pairs[1][0])
        assert same_bits(pairs[0][1], pairs[1][1])
    total, expected = on_device.clone(), values.clone()
    kernels.add(total, on_device.bfloat16())
    KERNELS.add(expected, values.bfloat16())
    assert same_bits(total.cpu(), expected)
    if torch.version.hip is None:  # CuPy has AMD's compiler flush denormals
        tiny = values * 2.0**-130
        total = tiny.cuda()
        kernels.add(total, total.clone())
        assert same_bits(total.cpu(), tiny + tiny)


def test_the_benchmark_covers_every_kernel():
    rates = measure(KERNELS, Device(vendor="cpu"), num_elements=3000, repeats=1)
    kinds = {rate.kernel.split()[0] for rate in rates}
    assert kinds == {"copy", "pack", "unpack", "cast", "add", "quantise", "dequantise"}
    assert rates[0].over_copy == 1.0
    assert all(rate.bytes_per_second > 0 for rate in rates)


@pytest.mark.gpu
@on_a_gpu
def test_compiled_kernels_reach_the_devices_copy_bandwidth():
    pytest.importorskip("cupy", reason="pip install 'hethub[nvidia]' or 'hethub[amd]'")
    device = choose_device(0, 1)
    # So much that a copy takes longer than the host's part of `pack`, which hands over 300 addresses: 0.24 ms on a CPU's core.
    rates = measure(kernels_for(device), device, num_elements=1 << 28, repeats=11)
    assert {rate.kernel: rate.over_copy for rate in rates if rate.over_copy < 0.8} == {}
