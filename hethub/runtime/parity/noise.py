"""A device's error in units of its own rounding noise: how much its results move when every input moves by one unit in
the last place."""

import math

import torch
from torch import Tensor

from hethub.runtime.parity.formulas import Formulas
from hethub.runtime.parity.subjects import Subject, Tensors, wide

PASSES, FAILS = 3.0, 10.0  # noises: below the one nothing is wrong, above the other something is
MOVES = 2
_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}


class Measured:
    """A subject on a device: what it computed, the noise of every output, and how far a second run of the same inputs is off.

    A device that gives other results each time moves under moved inputs, too: its noise would excuse whatever it computes.
    """

    def __init__(self, subject: Subject, device: torch.device) -> None:
        self.subject = subject
        self._wide = {name: wide(value) for name, value in subject.inputs.items()}
        self.found = self._run(subject.inputs, device)
        again = self._run(subject.inputs, device)
        self.unsteady = {
            name: _ratio(_size(again.pop(name) - own), self._floor(name)) for name, own in self.found.items()
        }
        moved = [self._run(one_unit_away(subject.inputs, seed), device) for seed in range(MOVES)]
        self._noise = {name: self._noise_of(name, [each[name] for each in moved]) for name in self.found}

    def _run(self, inputs: Tensors, device: torch.device) -> dict[str, Tensor]:
        found = self.subject.run({name: value.to(device) for name, value in inputs.items()})
        return {name: value.to("cpu", torch.float64) for name, value in found.items()}

    def _floor(self, name: str) -> float:
        """What rounding an output, or the roundings on its way, may cost at least."""
        dtype = next(value.dtype for value in self.subject.inputs.values() if value.is_floating_point())
        sums = torch.finfo(torch.promote_types(dtype, torch.float32)).eps * self.subject.roundings
        return max(torch.finfo(dtype).eps / 2, sums) * _size(self.found[name])

    def _noise_of(self, name: str, moved: list[Tensor]) -> float:
        """Its change under moved inputs; at least its floor."""
        changes = [_size(each - self.found[name]) for each in moved]
        return max(math.sqrt(sum(change**2 for change in changes) / len(moved)), self._floor(name))

    def errors(self, formulas: Formulas) -> dict[str, float]:
        """Return, for each output, how far the device is from these formulas in fp64, in units of its rounding noise."""
        expected = self.subject.expect(formulas, self._wide)
        assert expected.keys() == self.found.keys()
        return {name: _ratio(_size(self.found[name] - expected[name]), self._noise[name]) for name in expected}


def worst(errors: dict[str, float]) -> tuple[str, float]:
    """The output that is furthest off."""
    return max(errors.items(), key=lambda item: item[1])


def one_unit_away(inputs: Tensors, seed: int) -> dict[str, Tensor]:
    """Every floating-point input but zeros moved to a neighbour of its type, up or down by a coin."""
    generator = torch.Generator().manual_seed(seed)

    def moved(value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value
        sign = torch.randint(0, 2, value.shape, generator=generator) * 2 - 1
        bits = value.view(_BITS[value.dtype])
        return torch.where(value == 0, bits, bits + sign.to(bits.dtype)).view(value.dtype)

    return {name: moved(value) for name, value in inputs.items()}


def _size(values: Tensor) -> float:
    """The root mean square."""
    return float(values.square().mean().sqrt())


def _ratio(error: float, noise: float) -> float:
    """Infinite where the device gave a NaN or an infinity, for moved inputs too."""
    if not math.isfinite(error + noise):
        return math.inf
    return error / noise if noise > 0 else (0.0 if error == 0 else math.inf)
