"""The device layer on a machine without a GPU, and its rules for visible devices."""

import importlib.machinery
import os
import sys
from types import ModuleType
from typing import get_args

import pytest
import torch

from hethub.kernels import compiled
from hethub.kernels import device as device_layer
from hethub.kernels.compiled import kernels_for
from hethub.kernels.device import Device, choose_device, visible_devices
from hethub.kernels.reference import TorchKernels
from hethub.report.tables import TRAINS_ON
from hethub.runtime.launch.device import open_device
from hethub.runtime.launch.launcher_environment import LaunchInfo
from hethub.spec.errors import BadInput


def test_tables_name_the_makers_that_the_device_layer_drives():
    """Tables are made without torch, which the device layer imports."""
    assert {*TRAINS_ON} == {*get_args(device_layer.Vendor)}


def test_a_cpu_needs_no_index():
    device = choose_device(3, 8, kind="cpu")
    assert (device.vendor, device.torch_device) == ("cpu", torch.device("cpu"))
    with device.new_stream().active():
        event = device.current_stream().record()
    event.synchronize()
    assert event.is_done()
    assert device.host_buffer(10).numel() == 10
    assert device.peak_memory_bytes() is None
    assert device.supports(torch.bfloat16)


def test_a_gpu_of_either_maker_is_cuda_for_torch():
    for vendor in ("nvidia", "amd"):
        device = Device(vendor=vendor, index=2)
        assert device.torch_device == torch.device("cuda", 2)


@pytest.mark.parametrize(
    ("count", "visible", "local_rank", "index"),
    [(1, "5", 3, 0), (4, None, 2, 2), (4, "0,1,2,3", 3, 3), (1, None, 0, 0)],
)
def test_which_device_a_rank_drives(monkeypatch, count, visible, local_rank, index):
    pretend_gpus(monkeypatch, count, visible)
    assert choose_device(local_rank, 4 if visible or count > 1 else 1).index == index


@pytest.mark.parametrize("count", [1, 2])
def test_more_ranks_than_devices_is_an_error_that_counts_them(monkeypatch, count):
    pretend_gpus(monkeypatch, count, None)
    with pytest.raises(BadInput, match=f"local rank 2 of 4 has no device: torch sees {count}"):
        choose_device(2, 4)


def pretend_gpus(monkeypatch, count, visible):
    monkeypatch.setattr(device_layer, "detect_vendor", lambda: "amd")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    for variable in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    if visible is not None:
        monkeypatch.setenv("HIP_VISIBLE_DEVICES", visible)


def test_hardware_queues_are_asked_for_before_the_driver_is_first_called(monkeypatch):
    """The driver reads them once; what the user has set stays."""
    seen = []
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.setenv("GPU_MAX_HW_QUEUES", "6")
    names = "CUDA_DEVICE_MAX_CONNECTIONS", "GPU_MAX_HW_QUEUES"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen.append([os.environ.get(name) for name in names]))
    assert device_layer.detect_vendor() == "cpu"
    assert seen == [["32", "6"]]


def test_fewer_hardware_queues_are_warned_of(monkeypatch, caplog):
    monkeypatch.setattr(
        "hethub.runtime.launch.device.choose_device", lambda *given, **options: FakeCard(vendor="nvidia")
    )
    alone = LaunchInfo(rank=0, size=1, local_rank=0, local_size=1, launcher="alone")
    for number, warned in (("32", False), ("1", True)):
        caplog.clear()
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", number)
        open_device(None, alone)
        assert ("CUDA_DEVICE_MAX_CONNECTIONS=1 is set, and 32 would be" in caplog.text) == warned


class FakeCard(Device):
    def activate(self):
        return None


def test_the_first_visible_devices_variable_counts():
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "1", "ROCR_VISIBLE_DEVICES": "0,2"}) == ["0", "2"]
    assert visible_devices({}) is None
    assert visible_devices({"CUDA_VISIBLE_DEVICES": ""}) == []


def test_a_gpu_without_bfloat16_computes_in_other_types(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *, including_emulation: including_emulation)
    card = Device(vendor="nvidia")
    assert [card.supports(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)] == [False, True, True]


def test_memory_that_the_allocator_has_cached_is_free(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 70)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda index: 30)
    assert Device(vendor="amd").free_memory_bytes() == 140


class Broken(ModuleType):
    """A CuPy that is there and does not work, as one built for another CUDA."""

    def __getattr__(self, name):
        raise ImportError("libcudart.so.12: cannot open shared object file")


def test_a_cupy_with_a_hip_runtime_of_its_own_is_not_taken(monkeypatch, caplog, tmp_path):
    """It would be handed streams that it does not know, and order nothing on the default one."""
    maps = tmp_path / "maps"
    line = "7f00-7f10 r-xp 00000000 08:01 42{}"
    own, machines = "/venv/torch/lib/libamdhip64.so", "/opt/rocm/lib/libamdhip64.so.7.2"
    maps.write_text("\n".join(line.format(path and f"      {path}") for path in ("", own, own, "/usr/lib/libc.so.6")))
    assert compiled.hip_runtimes(maps) == {own}
    maps.write_text(f"{maps.read_text()}\n{line.format('      ' + machines)}\n")
    both = compiled.hip_runtimes(maps)
    assert both == {own, machines}
    loads = ModuleType("cupy")
    loads.__spec__ = importlib.machinery.ModuleSpec("cupy", None)
    monkeypatch.setitem(sys.modules, "cupy", loads)
    monkeypatch.setattr(compiled, "hip_runtimes", lambda: both)
    assert type(kernels_for(Device(vendor="amd"))) is TorchKernels
    assert machines in caplog.text


def test_a_cupy_that_does_not_work_leaves_torchs_own_kernels_and_a_warning(monkeypatch, caplog):
    broken = Broken("cupy")
    broken.__spec__ = importlib.machinery.ModuleSpec("cupy", None)
    monkeypatch.setitem(sys.modules, "cupy", broken)
    assert type(kernels_for(Device(vendor="nvidia"))) is TorchKernels
    assert "libcudart.so.12" in caplog.text
