"""The device layer on a machine without a GPU, and its rules for visible devices."""

import importlib.machinery
import os
import sys
import weakref
from types import ModuleType, SimpleNamespace
from typing import ClassVar, get_args
from unittest.mock import Mock

import pytest
import torch

from hethub.kernels import compiled
from hethub.kernels import device as device_layer
from hethub.kernels.compiled import kernels_for
from hethub.kernels.device import Clock, Device, Stream, choose_device, visible_devices
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


class Torch:
    """torch.cuda, whose calls are noted as (name, arguments)."""

    ANSWERS: ClassVar = {"get_device_name": "A card", "max_memory_reserved": 70, "get_device_properties": SimpleNamespace(
        uuid="GPU-1", pci_domain_id=0, pci_bus_id=0x1A, pci_device_id=1, total_memory=80, multi_processor_count=132)}  # fmt: skip
    NAMES = ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "check_error", *ANSWERS)

    def __init__(self, monkeypatch):
        self.calls = []
        for name in self.NAMES:
            monkeypatch.setattr(torch.cuda, name, self.noting(name))
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
        cudart = SimpleNamespace(**{name: self.noting(name) for name in ("cudaHostRegister", "cudaHostUnregister")})
        monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)

    def noting(self, name):
        def call(*arguments):
            self.calls.append((name, *arguments))
            return self.ANSWERS.get(name)

        return call


def use(device, memory):
    """What is asked of a device by those who drive it, and what it answers."""
    for act in (device.activate, device.synchronize, device.release_memory):
        act()
    device.pin(memory)
    device.unpin(memory)
    return [device.native_library, device.name, device.identity, device.memory_bytes(), device.compute_units(),
            device.peak_memory_bytes()]  # fmt: skip


def test_a_device_is_asked_by_its_index_and_pins_for_all(monkeypatch):
    asked, memory = Torch(monkeypatch), torch.empty(10)
    portable = 1  # cudaHostRegisterPortable of the CUDA Runtime API, and hipHostRegisterPortable
    answers = ["A card", "GPU-1 00:1a:01", 80, 132, 70]
    assert use(Device(vendor="amd", index=2), memory) == ["RCCL 2.27.5", *answers]
    assert asked.calls[:8] == [
        ("set_device", 2), ("synchronize", 2), ("empty_cache",), ("reset_peak_memory_stats", 2),
        ("cudaHostRegister", memory.data_ptr(), 40, portable), ("check_error", None),
        ("cudaHostUnregister", memory.data_ptr()), ("check_error", None),
    ]  # fmt: skip
    assert all(call[1:] == (2,) for call in asked.calls[8:])
    assert use(Device(vendor="nvidia", index=2), memory) == ["NCCL 2.27.5", *answers]


def test_streams_wait_for_points_in_others_and_the_host_for_neither(monkeypatch):
    made = Mock()
    monkeypatch.setattr(torch.cuda, "Event", made)
    ahead, behind, tensor = Mock(), Mock(), Mock(is_cuda=True)
    event = Stream(ahead).record()
    made.assert_called_once_with(blocking=True)
    point = made.return_value
    point.record.assert_called_once_with(ahead)
    Stream(behind).wait(event)
    behind.wait_event.assert_called_once_with(point)
    Stream(behind).keep(tensor)
    tensor.record_stream.assert_called_once_with(behind)
    Stream(behind).keep(torch.empty(1))  # on a CPU, where torch refuses to
    point.synchronize.assert_not_called()
    event.synchronize()
    point.synchronize.assert_called_once_with()
    point.query.return_value = False
    assert not event.is_done()


def test_a_device_s_clock_counts_from_a_point_whose_time_is_known(monkeypatch):
    """An event tells milliseconds to another; the one that the host has waited for is taken anew before fp32 grows coarse."""
    monkeypatch.setattr(torch.cuda, "Event", Mock(side_effect=lambda **_: Mock(elapsed_time=Mock(return_value=250.0))))
    now = iter([1000.0, 1001.0, 1002.0, 1700.0, 1702.0])
    monkeypatch.setattr(device_layer, "monotonic", lambda: next(now))
    clock = Clock(Device(vendor="nvidia"))
    first, second, later = (clock.stamp() for _ in range(3))
    assert second.anchor is first.anchor
    assert later.anchor is not first.anchor
    first.anchor.synchronize.assert_called_once_with()
    assert [clock.seconds(stamp) for stamp in (first, second, later)] == [1001.25, 1001.25, 1702.25]
    first.at.synchronize.assert_called_once_with()
    assert clock.between(first, second) == 0.25
    first.at.elapsed_time.assert_called_once_with(second.at)


def test_released_memory_is_that_of_cycles_too():
    trainer = ModuleType("trainer")
    trainer.itself, gone = trainer, weakref.ref(trainer)
    del trainer
    Device(vendor="cpu").release_memory()
    assert gone() is None


def test_a_cpu_asks_nothing_of_torchs_devices(monkeypatch):
    asked = Torch(monkeypatch)
    assert use(Device(vendor="cpu"), torch.empty(10)) == ["", "CPU", None, None, None, None]
    assert asked.calls == []


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
