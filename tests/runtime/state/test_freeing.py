"""What ZeRO and offload let go is gone: no storage of a unit outlives it, whoever may hold a view."""

import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.layouts import MODEL, Case, build_trainer, chunked, replica, stage
from tests.support.ranks import run_ranks

SIX = MODEL.replace(layers=6)


def pair(zero: int, **more: Any) -> list[dict[str, Any]]:
    return [stage((0, 6), replica([0], 4, 1), replica([1], 4, 2), zero=zero, **more)]


def ministages(**more: Any) -> list[dict[str, Any]]:
    return [chunked([(0, 2), (2, 4), (4, 6)], replica([0], 4, 1), replica([1], 4, 2), **more)]


class Storages:
    """The storages of one sort of buffer that have been made, and the most of them that were alive at once."""

    def __init__(self, held: Callable[[], int]) -> None:
        self._held, self._made = held, list[weakref.ref[torch.UntypedStorage]]()
        self.most = 0

    def alive(self) -> int:
        """How many live. A thread of the communicator may hold its last operation for a moment yet."""
        end = time.monotonic() + 2
        while True:
            self._made = [made for made in self._made if made() is not None]
            if len(self._made) <= self._held() or time.monotonic() > end:
                return len(self._made)
            time.sleep(0.01)

    def add(self, buffer: torch.Tensor) -> None:
        if all(made() is not buffer.untyped_storage() for made in self._made):
            self._made.append(weakref.ref(buffer.untyped_storage()))
        alive = self.alive()
        assert alive <= self._held(), f"{alive} storages of units are alive, {self._held()} are at hand"
        self.most = max(self.most, alive)


def train_watching(world: Any, case: Case) -> tuple[dict[str, int], dict[str, int]]:
    """The most storages of units alive at once, of weights and of gradients, and those alive behind the last step."""
    trainer = build_trainer(world, case)
    watched = {}
    if (weights := trainer.zero_manager.weights) is not None:
        present = weights._present
        watched["weights"] = Storages(lambda: len(present))
        watch(weights, "start", watched["weights"], lambda unit: present[unit].buffer)
    if (gradients := trainer.zero_manager.gradients) is not None:
        opened, reducing = gradients._open, gradients._reducing
        watched["gradients"] = Storages(lambda: len(opened) + len(reducing))
        watch(gradients, "open", watched["gradients"], opened.__getitem__)
    for step in range(1, case.steps + 1):
        trainer.run_step(step)
    trainer.stepping.flush()
    most = {name: storages.most for name, storages in watched.items()}
    return most, {name: storages.alive() for name, storages in watched.items()}


def watch(manager: Any, name: str, storages: Storages, buffer_of: Callable[[int], torch.Tensor]) -> None:
    """Notes the buffer of every unit that a call of the manager's method brings."""
    method = getattr(manager, name)

    def watched(unit: int) -> None:
        method(unit)
        storages.add(buffer_of(unit))

    setattr(manager, name, watched)


# Two units: of the layer at work and the next, or the one before it. A ministage's weights: its two layers and the next.
CASES = [
    (Case(name="zero 2", stages=pair(2)), {"gradients": 2}),
    (Case(name="zero 3", stages=pair(3)), {"weights": 2, "gradients": 2}),
    (Case(name="zero 3, layered", stages=pair(3), schedule="layered"), {"weights": 2, "gradients": 2}),
    (Case(name="zero 3, full recompute", stages=pair(3, recompute="full")), {"weights": 2, "gradients": 2}),
    (Case(name="zero 2, ministages", stages=ministages(zero=2), schedule="ministages"), {"gradients": 2}),
    (
        Case(name="zero 3, ministages", stages=ministages(zero=3), schedule="ministages"),
        {"weights": 3, "gradients": 2},
    ),
    (Case(name="zero 0, parameters offloaded", stages=pair(0, offload=["parameters"])), {"weights": 2}),
    (
        Case(name="zero 3, all offloaded", stages=pair(3, offload=["parameters", "optimizer", "activations"])),
        {"weights": 2, "gradients": 2},
    ),
    (
        Case(name="ministages, offloaded", stages=ministages(offload=["parameters"]), schedule="ministages"),
        {"weights": 3},
    ),
]


@pytest.mark.parametrize(("case", "most"), CASES, ids=lambda value: getattr(value, "name", ""))
def test_no_more_units_are_alive_than_at_hand(case: Case, most: dict[str, int]) -> None:
    case = Case(**{**vars(case), "model": SIX, "steps": 2})
    for alive, left in run_ranks(case.size, train_watching, case):
        assert alive == most
        assert left == dict.fromkeys(most, 0)


class UnitsAlive:
    """The most units' worth of flat tensors made in hethub.runtime.state that were alive at once, by type."""

    def __init__(self, unit: int) -> None:
        self._unit, self._elements = unit, Counter[torch.dtype]()
        self.most = Counter[torch.dtype]()

    def watch(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Counts what torch's function of that name makes."""
        make = getattr(torch, name)

        def watched(*args: Any, **named: Any) -> torch.Tensor:
            made: torch.Tensor = make(*args, **named)
            if sys._getframe(1).f_globals["__name__"].startswith("hethub.runtime.state"):
                weakref.finalize(made.untyped_storage(), self._elements.subtract, {made.dtype: made.numel()})
                self._add(made.dtype, made.numel())
            return made

        monkeypatch.setattr(torch, name, watched)

    def _add(self, dtype: torch.dtype, elements: int) -> None:
        self._elements[dtype] += elements
        end = time.monotonic() + 2  # a thread of the communicator may hold its last operation for a moment yet
        while self._elements[dtype] > 2 * self._unit and time.monotonic() < end:
            time.sleep(0.01)
        self.most[dtype] = max(self.most[dtype], self._elements[dtype] / self._unit)


def train_counting(world: Any, case: Case) -> Counter[torch.dtype]:
    """How many of this rank's largest units were alive at once."""
    trainer = build_trainer(world, case)
    found = UnitsAlive(max(each.numel for each in trainer.storage.unit_maps.values()))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "cat"):
            found.watch(name, patch)
        for step in range(1, case.steps + 1):
            trainer.run_step(step)
    return found.most


@pytest.mark.parametrize("schedule", ["1f1b", "layered"])
def test_parts_that_lie_apart_are_joined_within_two_units(schedule: str) -> None:
    """A unit's weights that are on their way lie there once; the copies of its gradients take its buffer's place."""
    stages = [stage((0, 6), replica([0], 4, 1), replica([1, 2], 4, 2), zero=3)]
    case = Case(name="unlike", stages=stages, model=SIX, steps=2, precision="bf16", schedule=schedule)
    alive = run_ranks(case.size, train_counting, case)
    assert all(most <= 2 for of_rank in alive for most in of_rank.values())
    assert alive[0] == {torch.bfloat16: 2, torch.float32: 2}  # the largest unit beside its parts
