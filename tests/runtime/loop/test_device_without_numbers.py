"""Steps on a device that has shapes and places but no numbers: what a device computes has no tensor of the host in it,
and nothing between two actions needs a number. So the first minute on a real one does not end on the wrong memory."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from hethub.communicator import World
from hethub.kernels.device import Clock, Device, Stamp, Stream
from hethub.runtime.loop import batch_loader, trainer
from hethub.runtime.loop.step_report import StepOutcome
from hethub.runtime.parity.subjects import subjects
from hethub.spec.job import TrainSpec
from tests.support.layouts import MODEL, Case, build_trainer, replica, stage
from tests.support.ranks import run_ranks


class Hollow(Device):
    """A device of torch's fake tensors, under the name of a backend that torch lets Python add."""

    @property
    def torch_device(self) -> torch.device:
        return torch.device("hollow", 0)

    def new_stream(self) -> Stream:
        return Stream(None)

    current_stream = new_stream

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def peak_memory_bytes(self) -> int:
        return 0


def outcome(*args: Any, **known: Any) -> StepOutcome:
    return StepOutcome(
        loss=1.0, grad_norm=2.0, memory_bytes=0, stop_requested=False, save_failed=False, busy_seconds=(None,)
    )


def install(world: World) -> None:
    """The rank's device, for the rest of its process; what a step agrees on with others is made up."""
    _setup_privateuseone_for_python_backend("hollow")
    object.__setattr__(world._context, "device", Hollow(vendor="nvidia"))
    World.all_gather_objects = lambda world, own, patience=None: [own]  # type: ignore[method-assign]
    dist.all_reduce = lambda *args, **options: None
    trainer.verify_owners = trainer.verify_copies = lambda *args: None
    trainer.gather_outcome = outcome
    batch_loader.is_gpu = lambda device: True
    Clock.stamp = lambda clock: Stamp(0.0)  # type: ignore[method-assign]
    Tensor.pin_memory = lambda tensor: tensor  # type: ignore[method-assign, assignment]
    torch.allclose = torch.equal = lambda *given, **options: True  # a kernel's results
    Tensor.__float__ = lambda tensor: 1.0  # type: ignore[method-assign, assignment]  # the loss, at the end of all actions


def case_of(name: str, *, precision: str = "bf16", schedule: str = "1f1b", **more: Any) -> Case:
    stages = [stage((0, 2), replica([0], 8, 4), **more)]  # a first layer and a last, each with its neighbour
    return Case(
        name=name, stages=stages, precision=precision, schedule=schedule, document_mask=name == "documents",
        model=MODEL.replace(layers=2),
    )  # fmt: skip


CASES = [
    case_of("bf16"), case_of("fp32", precision="fp32"), case_of("fp16", precision="fp16"), case_of("documents"),
    case_of("full recompute", recompute="full"), case_of("ZeRO-3", zero=3), case_of("zero bubble", schedule="zero_bubble"),
    *(case_of(f"{what} offloaded", offload=[what]) for what in ("optimizer", "activations", "parameters")),
]  # fmt: skip


def trained(world: World, cases: list[Case]) -> list[tuple[str, str]]:
    """Where the weights of each case lie after two steps and an evaluation."""
    install(world)
    found = []
    for case in cases:
        with FakeTensorMode(allow_non_fake_inputs=True):
            own = build_trainer(world, case)
            for step in (1, 2):
                own.run_step(step)
            own.evaluate(own.dataset, 1)
            assert not [*own.arena._leaving, *own.arena._left], "what has left is let go"
        found.append((case.name, str(own.storage.weights.device)))
    return found


def test_a_step_mixes_nothing_of_the_host_with_the_device() -> None:
    assert run_ranks(1, trained, CASES, timeout_seconds=280)[0] == [(case.name, "hollow:0") for case in CASES]


def leaving(world: World) -> list[int]:
    """How many layers' tensors are on their way to the host at once, over a step."""
    install(world)
    [case] = [case for case in CASES if case.name == "activations offloaded"]
    found, of_layer = [], []
    with FakeTensorMode(allow_non_fake_inputs=True):
        own = build_trainer(world, case)
        leave = own.arena.leave

        def counted(copies: list[Any]) -> None:
            leave(copies)
            of_layer.append(len(copies))
            found.append(len([*own.arena._leaving, *own.arena._left]))

        own.arena.leave = counted  # type: ignore[method-assign]
        own.run_step(1)
    return [max(found), max(of_layer)]


def test_two_layers_activations_leave_at_once() -> None:
    """Layers are released at the end of a pass only; what has left them goes before."""
    most, of_layer = run_ranks(1, leaving)[0]
    assert 0 < most <= 2 * of_layer


def left_on_the_host(world: World) -> str:
    install(world)
    with FakeTensorMode(allow_non_fake_inputs=True):
        own = build_trainer(world, CASES[0])
        own.stage.cos = torch.zeros(own.stage.cos.shape, dtype=torch.bfloat16)
        with pytest.raises(RuntimeError) as raised:
            own.run_step(1)
    return str(raised.value)


def test_a_tensor_left_on_the_host_is_seen() -> None:
    assert "found at least two devices, hollow:0 and cpu" in run_ranks(1, left_on_the_host)[0]


def compared(world: World, precision: str) -> list[tuple[str, set[str]]]:
    """Where the results lie of everything that a device is held against the formulas with."""
    install(world)
    train, found = TrainSpec(seq_len=16, precision=precision), []  # type: ignore[arg-type]
    for subject in subjects(CASES[0].model, train, masks_documents=False):
        with FakeTensorMode(allow_non_fake_inputs=True):
            inputs = {
                name: torch.empty(value.shape, dtype=value.dtype, device=world.device.torch_device)
                for name, value in subject.inputs.items()
            }
            found.append((subject.name, {str(value.device) for value in subject.run(inputs).values()}))
    return found


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_what_is_compared_with_the_formulas_runs_on_the_device(precision: str) -> None:
    found = run_ranks(1, compared, precision)[0]
    assert {"layer", "head", "optimizer step"} < {name for name, _ in found}
    assert [places for _, places in found] == [{"hollow:0"}] * len(found)
