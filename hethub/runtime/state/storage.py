"""A rank's parameters and gradients in flat storage, addressed by ranges of the state axis."""

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from hethub.runtime.memory.host_arena import HostArena
from hethub.runtime.state.parameter import Parameter
from hethub.spec.layout.bind import Assignment
from hethub.spec.layout.state import PlacedTensor, StateMap
from hethub.spec.ranges import Range, from_sizes, overlap

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Held = tuple[PlacedTensor, Range]  # a tensor and a run of it on the state axis


class FlatMap:
    """Where runs of the state axis lie in a flat tensor: one after the other, so runs that touch there touch here."""

    def __init__(self, held: Sequence[Held]) -> None:
        self.held = list(held)
        here = from_sizes(run.size for _, run in self.held)
        self._places = [(placed, run, place) for (placed, run), place in zip(self.held, here, strict=True)]
        self.numel = here[-1].stop if here else 0

    def local(self, run: Range) -> Range:
        """Where a run of the state axis lies; it is a part of one that was given."""
        for _, held, here in self._places:
            if held.start <= run.start < held.stop:
                return run.shift(here.start - held.start)
        raise AssertionError(f"{run} is not here")

    def locals(self, runs: Sequence[Range]) -> list[Range]:
        """Return the `local` ranges of several runs; ranges that touch are joined."""
        joined: list[Range] = []
        for run in runs:
            here = self.local(run)
            if joined and joined[-1].stop == here.start:
                joined[-1] = Range(joined[-1].start, here.stop)
            else:
                joined.append(here)
        return joined

    def views(self, flat: Tensor) -> Iterator[tuple[PlacedTensor, Range, Tensor]]:
        """Every held run with its elements of `flat`, in order."""
        for placed, run, here in self._places:
            yield placed, run, flat[here.start : here.stop]


def shaped(values: Tensor, placed: PlacedTensor) -> Tensor:
    """A rank's shard of a tensor in stored shape (cut dimension first)."""
    return values.view(-1, *placed.info.stored_shape[1:])


class FlatStorage:
    """One rank's weights (in the run's precision) and gradients (at least fp32), shards in order of the state axis.

    `weights` and `grads` hold what stays on the device for the whole run, at the places that `weight_map` and
    `grad_map` tell. What comes and goes with its unit (hethub.runtime.state.zero) is bound to the parameters by
    ZeroWeights and ZeroGradients, laid out by `unit_maps`; what stays of it lies, per unit, in

    - `owned_grads` (ZeRO 2 and 3): the rank's own part of the gradients, laid out by `owned_maps`;
    - `owned_weights` (ZeRO 3): the rank's own part of the weights, likewise; in host memory where they are offloaded;
    - `offloaded_weights` (offloaded, below ZeRO 3): all that the rank holds of the unit, in host memory.
    """

    def __init__(
        self,
        state: StateMap,
        assignment: Assignment,
        precision: str,
        device: torch.device,
        arena: HostArena | None = None,
    ) -> None:
        self.state, self.assignment, self.device = state, assignment, device
        self.held = state.held_by(assignment)
        self.dtype = DTYPES[precision]
        self.grad_dtype = torch.promote_types(self.dtype, torch.float32)
        self.shards_gradients = state.level(assignment.stage) >= 2
        self.shards_weights = state.level(assignment.stage) == 3
        self.arena = arena if "parameters" in state.layout.stages[assignment.stage].offload else None
        moving = [(placed, run) for placed, run in self.held if self._unit(placed) is not None]
        staying = [held for held in self.held if held not in moving]
        self.unit_maps = {unit: FlatMap(list(own)) for unit, own in groupby(moving, lambda held: self._unit(held[0]))}
        self.owned_maps = {unit: FlatMap(self._owned(unit)) for unit in self.unit_maps}
        self.weight_map = FlatMap(staying if self.moves_weights else self.held)
        self.grad_map = FlatMap(staying if self.shards_gradients else self.held)
        self._allocate()
        self.parameters = dict(self._parameters())

    @property
    def moves_weights(self) -> bool:
        """Whether weights of matrices are on the device only while their layer computes."""
        return self.shards_weights or self.arena is not None

    def _unit(self, placed: PlacedTensor) -> int | None:
        moves = self.state.moves(self.assignment.stage) and placed.stage == self.assignment.stage
        return placed.unit if moves else None

    def _owned(self, unit: int | None) -> list[Held]:
        """The runs of a unit that this rank steps, cut at the borders of tensors, in order of the buckets' pieces."""
        rank, owned = self.assignment.rank, []
        for bucket in self.state.buckets:
            if bucket.stage == self.assignment.stage and bucket.unit == unit:
                for piece in bucket.pieces:
                    if rank in piece.group.contributors:
                        owned += [cut for run in piece.owned_runs(rank) for cut in self.cut(run)]
        return owned

    def cut(self, run: Range) -> list[Held]:
        """A run of the state axis that this rank holds, cut at the borders of tensors."""
        return [(placed, part) for placed, held in self.held if (part := overlap(held, run))]

    def _allocate(self) -> None:
        self.weights = torch.zeros(self.weight_map.numel, dtype=self.dtype, device=self.device)
        self.grads = torch.zeros(self.grad_map.numel, dtype=self.grad_dtype, device=self.device)
        self.owned_weights: dict[int | None, Tensor] = {}
        self.offloaded_weights: dict[int | None, Tensor] = {}
        self.owned_grads: dict[int | None, Tensor] = {}
        for unit, whole in self.unit_maps.items():
            numel = self.owned_maps[unit].numel
            if self.shards_weights:
                self.owned_weights[unit] = self._persistent(numel)
            elif self.arena is not None:
                self.offloaded_weights[unit] = self._persistent(whole.numel)
            if self.shards_gradients:
                self.owned_grads[unit] = torch.zeros(numel, dtype=self.grad_dtype, device=self.device)

    def _persistent(self, numel: int) -> Tensor:
        if self.arena is not None:
            return self.arena.empty(numel, self.dtype).zero_()
        return torch.zeros(numel, dtype=self.dtype, device=self.device)

    def _parameters(self) -> Iterator[tuple[str, Parameter]]:
        weights = {placed.info.name: shaped(view, placed) for placed, _, view in self.weight_map.views(self.weights)}
        grads = {placed.info.name: shaped(view, placed) for placed, _, view in self.grad_map.views(self.grads)}
        for placed, _ in self.held:
            name = placed.info.name
            yield name, Parameter(name, weights.get(name, self.weights[:0]), grads.get(name, self.grads[:0]))

    def persistent(self) -> Iterator[tuple[PlacedTensor, Range, Tensor]]:
        """All weights that this rank keeps, wherever they lie, tensor by tensor: the run on the axis and its values."""
        yield from self.weight_map.views(self.weights)
        for unit in self.unit_maps:
            if unit in self.owned_weights:
                yield from self.owned_maps[unit].views(self.owned_weights[unit])
            elif unit in self.offloaded_weights:
                yield from self.unit_maps[unit].views(self.offloaded_weights[unit])

    def held_weights(self, unit: int | None) -> Tensor | None:
        """Where all that this rank holds of a unit (None: of what stays) persists; None where it keeps its own part
        only."""
        if unit in self.owned_weights:
            return None
        return self.offloaded_weights.get(unit, self.weights)

    @property
    def device_bytes(self) -> int:
        """Bytes of weights and gradients on the device all the time."""
        owned = [] if self.arena is not None else list(self.owned_weights.values())
        return sum(tensor.nbytes for tensor in (self.weights, self.grads, *owned, *self.owned_grads.values()))


def take(flat: Tensor, ranges: Sequence[Range], *, copied: bool = False) -> Tensor:
    """The ranges of `flat` one after the other: a view where there is one, unless a copy is asked for; else a copy."""
    if len(ranges) == 1 and not copied:
        return flat[ranges[0].start : ranges[0].stop]
    return torch.cat([flat[r.start : r.stop] for r in ranges]) if ranges else flat[:0]


def put(flat: Tensor, ranges: Sequence[Range], values: Tensor) -> None:
    """Writes `values` to the ranges of `flat`, which `take` gave; nothing to do where it was a view."""
    if len(ranges) == 1 and values.data_ptr() == flat[ranges[0].start :].data_ptr():
        return
    for r, place in zip(ranges, from_sizes(r.size for r in ranges), strict=True):
        flat[r.start : r.stop].copy_(values[place.start : place.stop])
