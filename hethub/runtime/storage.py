"""A rank's parameters and gradients in flat storage, addressed by ranges of the state axis."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hethub.runtime.parameter import Parameter
from hethub.spec.layout import Seat
from hethub.spec.ranges import Range
from hethub.spec.state import PlacedTensor, StateMap

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class FlatStorage:
    """One rank's weights (in the run's precision) and gradients (at least fp32), shards in order of the state axis.

    Shards that touch on the axis touch here too, so a run of the axis that this rank holds is one slice.
    """

    def __init__(self, state: StateMap, seat: Seat, precision: str, device: torch.device) -> None:
        self.state, self.seat = state, seat
        self.held = state.held_by(seat)
        dtype = DTYPES[precision]
        numel = sum(run.size for _, run in self.held)
        self.weights = torch.zeros(numel, dtype=dtype, device=device)
        self.grads = torch.zeros(numel, dtype=torch.promote_types(dtype, torch.float32), device=device)
        self._offsets: list[tuple[Range, int]] = []
        self.parameters: dict[str, Parameter] = {}
        offset = 0
        for placed, run in self.held:
            self._offsets.append((run, offset))
            local = Range(offset, offset + run.size)
            self.parameters[placed.info.name] = Parameter(
                placed.info.name, self._view(self.weights, local, placed), self._view(self.grads, local, placed)
            )
            offset = local.stop

    @staticmethod
    def _view(flat: Tensor, local: Range, placed: PlacedTensor) -> Tensor:
        return flat[local.start : local.stop].view(-1, *placed.info.stored_shape[1:])

    @property
    def numel(self) -> int:
        return self.weights.numel()

    def local(self, run: Range) -> Range:
        """Where a run of the state axis that this rank holds lies in its storage."""
        for held, offset in self._offsets:
            if held.start <= run.start < held.stop:
                return run.shift(offset - held.start)
        raise AssertionError(f"rank {self.seat.rank} does not hold {run}")

    def locals(self, runs: Sequence[Range]) -> list[Range]:
        """As `local`, for several runs; those that touch in storage are joined."""
        joined: list[Range] = []
        for run in runs:
            here = self.local(run)
            if joined and joined[-1].stop == here.start:
                joined[-1] = Range(joined[-1].start, here.stop)
            else:
                joined.append(here)
        return joined


def take(flat: Tensor, ranges: Sequence[Range]) -> Tensor:
    """The ranges of `flat` one after the other: a view where there is one, else a copy."""
    if len(ranges) == 1:
        return flat[ranges[0].start : ranges[0].stop]
    return torch.cat([flat[r.start : r.stop] for r in ranges]) if ranges else flat[:0]


def put(flat: Tensor, ranges: Sequence[Range], values: Tensor) -> None:
    """Writes `values` to the ranges of `flat`, which `take` gave; nothing to do where it was a view."""
    if len(ranges) == 1 and values.data_ptr() == flat[ranges[0].start :].data_ptr():
        return
    position = 0
    for r in ranges:
        flat[r.start : r.stop].copy_(values[position : position + r.size])
        position += r.size
