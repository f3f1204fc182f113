"""AdamW on the elements a rank owns, and its share of the gradient's norm."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from hethub.kernels.squares import sum_of_squares
from hethub.runtime.memory.accounting import MemoryMeter
from hethub.runtime.memory.host_arena import Copy, Fetch, HostArena
from hethub.runtime.state.learning_rate import Schedule
from hethub.runtime.state.reduction import LocalPiece, Reducer
from hethub.runtime.state.storage import FlatStorage, Held
from hethub.spec.job import TrainSpec
from hethub.spec.layout.state import Bucket, brought_elements
from hethub.spec.layout.tensors import TensorInfo
from hethub.spec.ranges import Range, from_sizes


def fused_adamw(
    state: Sequence[Sequence[Tensor]],
    grads: Sequence[Tensor],
    updates: Sequence[Tensor],
    train: TrainSpec,
    *,
    lr: float,
    decays: bool,
    grad_scale: Tensor | None = None,
) -> None:
    """torch's fused AdamW, in place: `state` is weight, first and second moment of each tensor, `updates` how often it
    was updated before (0-d, fp32), which counts on; gradients are divided by `grad_scale` on the way."""
    adamw(
        [each[0] for each in state],
        list(grads),
        [each[1] for each in state],
        [each[2] for each in state],
        [],
        list(updates),
        fused=True,
        grad_scale=grad_scale,
        amsgrad=False,
        maximize=False,
        beta1=train.betas[0],
        beta2=train.betas[1],
        lr=lr,
        weight_decay=train.weight_decay * decays,
        eps=train.eps,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnedRun:
    """Elements that this rank steps, and what the optimizer keeps for them: flat tensors with an element for each.

    `axis` tells which they are, in order; `saved` are the ranges of the flat axis that this rank writes to checkpoints.
    Their gradient lies in `storage.grads`, or in the unit's owned gradient, at `local`. `master` is the weight itself
    unless the run computes in half precision. What is offloaded lies in host memory.
    """

    axis: tuple[Held, ...]
    saved: tuple[Range, ...]
    local: Range
    bucket: Bucket
    counts: bool  # in the gradient norm: another rank may step the same elements without sharding
    weight: Tensor
    weight_is_offloaded: bool
    grad_unit: int | None
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    updates: Tensor  # 0-d, fp32

    @property
    def state(self) -> tuple[Tensor, Tensor, Tensor]:
        """Master, first and second moment, where they persist."""
        return self.master, self.exp_avg, self.exp_avg_sq


class Optimizer:
    """AdamW over the runs a rank owns; half precisions keep fp32 masters.

    torch's fused AdamW does the arithmetic. Every element has one owner that counts it in the norm. With `offload:
    optimizer` moments and masters lie in `arena` and come to the device `brought_elements` at a time, the next while these
    are stepped. Runs are cut to that length too: the moments of a whole embedding in one copy would be hidden by nothing.
    """

    def __init__(
        self, storage: FlatStorage, reducer: Reducer, train: TrainSpec, arena: HostArena, meter: MemoryMeter
    ) -> None:
        self.storage, self.train, self.schedule = storage, train, Schedule(train)
        self.keeps_masters = storage.dtype != storage.grad_dtype
        offload = storage.state.layout.stages[storage.assignment.stage].offload
        self._state_arena = arena if "optimizer" in offload else None
        self.arena = self._state_arena or storage.arena
        self._meter = meter
        self.runs = [
            run
            for piece, saved in zip(reducer.pieces, reducer.saved_runs(), strict=True)
            for run in self._runs(piece, tuple(saved))
        ]

    def _runs(self, piece: LocalPiece, saved: tuple[Range, ...]) -> Iterator[OwnedRun]:
        """The piece's owned runs, those joined that touch both as weights and as gradients."""
        joined: list[tuple[Tensor, Range, Range, list[Held]]] = []
        most = sys.maxsize if self.arena is None else brought_elements()
        owned = piece.piece.owned_runs(self.storage.assignment.rank)
        for run in (part for whole in owned for part in _cut(whole, most)):
            flat, weight, grad = self._homes(piece.bucket, run)
            last = joined[-1] if joined else None
            touches = last is not None and (last[1].stop, last[2].stop) == (weight.start, grad.start)
            if last is not None and touches and last[1].size + weight.size <= most:
                joined[-1] = (
                    flat,
                    Range(last[1].start, weight.stop),
                    Range(last[2].start, grad.stop),
                    [*last[3], *self.storage.cut(run)],
                )
            else:
                joined.append((flat, weight, grad, self.storage.cut(run)))
        for flat, weight, grad, axis in joined:
            yield self._run(piece, flat[weight.start : weight.stop], grad, tuple(axis), saved)

    def _homes(self, bucket: Bucket, run: Range) -> tuple[Tensor, Range, Range]:
        """Where an owned run's weights persist and its summed gradients lie."""
        storage, unit = self.storage, bucket.unit
        grad = storage.owned_maps[unit] if self._shards_gradient(bucket) else storage.grad_map
        if unit in storage.owned_weights:
            weights, flat = storage.owned_maps[unit], storage.owned_weights[unit]
        elif unit in storage.offloaded_weights:
            weights, flat = storage.unit_maps[unit], storage.offloaded_weights[unit]
        else:
            weights, flat = storage.weight_map, storage.weights
        return flat, weights.local(run), grad.local(run)

    def _shards_gradient(self, bucket: Bucket) -> bool:
        return bucket.unit is not None and self.storage.shards_gradients

    def _run(
        self, piece: LocalPiece, weight: Tensor, local: Range, axis: tuple[Held, ...], saved: tuple[Range, ...]
    ) -> OwnedRun:
        return OwnedRun(
            axis=axis,
            saved=saved,
            local=local,
            bucket=piece.bucket,
            counts=piece.piece.group.sharded or piece.first_contributor == self.storage.assignment.rank,
            weight=weight,
            weight_is_offloaded=self.storage.arena is not None and piece.bucket.unit is not None,
            grad_unit=piece.bucket.unit if self._shards_gradient(piece.bucket) else None,
            master=self._new(local.size).copy_(weight) if self.keeps_masters else weight,
            exp_avg=self._new(local.size).zero_(),
            exp_avg_sq=self._new(local.size).zero_(),
            updates=torch.zeros((), dtype=torch.float32, device=self.storage.device),
        )

    def _new(self, numel: int) -> Tensor:
        """A flat tensor (numel,) of the state's type, where the state lies."""
        if self._state_arena is not None:
            return self._state_arena.empty(numel, self.storage.grad_dtype)
        return torch.empty(numel, dtype=self.storage.grad_dtype, device=self.storage.device)

    def gradient(self, run: OwnedRun) -> Tensor:
        """The summed gradient of an owned run, once its reduction is through."""
        flat = self.storage.grads if run.grad_unit is None else self.storage.owned_grads[run.grad_unit]
        return flat[run.local.start : run.local.stop]

    def square_sum(self, runs: Iterable[OwnedRun] | None = None) -> Tensor:
        """The sum of squares of the gradients this rank counts, 0-d in fp64 (inf or nan where one of them is)."""
        counted = [self.gradient(run) for run in (self.runs if runs is None else runs) if run.counts]
        return sum_of_squares(counted) if counted else torch.zeros((), dtype=torch.float64, device=self.storage.device)

    @torch.no_grad()
    def step_runs(self, runs: Sequence[OwnedRun], step: int, scale: float) -> None:
        """One AdamW update of these runs with gradients multiplied by `scale` (clipping, loss scale)."""
        if self.arena is None:
            self._update(runs, [run.state for run in runs], step, scale)
            return
        batches = list(_batches(runs, brought_elements()))
        coming = [self._bring(run) for run in batches[0]] if batches else []
        leaving, left = list[Copy](), list[Copy]()
        for batch, following in zip_longest(batches, batches[1:], fillvalue=()):
            # One batch is fetched, one stepped and one stored. Else the host would run ahead of the copies, and an allocator
            # hand out nothing that waits for one.
            for copy in left:
                copy.finish()
            left = leaving
            brought, coming = coming, [self._bring(run) for run in following]
            leaving = self._step_brought(batch, brought, step, scale)

    def _step_brought(
        self, batch: Sequence[OwnedRun], brought: list[list["Fetch | Tensor"]], step: int, scale: float
    ) -> list[Copy]:
        """Steps a batch; its copies to the host."""
        state = [tuple(item.wait() if isinstance(item, Fetch) else item for item in each) for each in brought]
        copies = self._update(batch, state, step, scale)
        for run, each in zip(batch, state, strict=True):
            copies += self._take_back(run, each)
        return copies

    def _bring(self, run: OwnedRun) -> list["Fetch | Tensor"]:
        """Master and moments of a run on the device, or on their way there."""
        assert self.arena is not None
        state_is_offloaded = self._state_arena is not None
        master_is_offloaded = state_is_offloaded if self.keeps_masters else run.weight_is_offloaded
        items: list[Fetch | Tensor] = []
        offloads = master_is_offloaded, state_is_offloaded, state_is_offloaded
        for tensor, offloaded in zip(run.state, offloads, strict=True):
            if not offloaded:
                items.append(tensor)
                continue
            fetch = self.arena.fetch(tensor)
            self._meter.take(fetch.values)
            items.append(fetch)
        return items

    def _take_back(self, run: OwnedRun, state: Sequence[Tensor]) -> list[Copy]:
        """Stores what `_bring` fetched."""
        assert self.arena is not None
        return [self.arena.store(home, new) for home, new in zip(run.state, state, strict=True) if home is not new]

    def _update(
        self, runs: Sequence[OwnedRun], state: Sequence[Sequence[Tensor]], step: int, scale: float
    ) -> list[Copy]:
        """One fused update of each run with its state on the device; weights that have masters follow them, by the copies
        returned where they are offloaded.

        The update scales gradients on its way, but by an fp32 number: too coarse for fp64.
        """
        dtype, inverse = self.storage.grad_dtype, None
        if scale != 1.0 and dtype == torch.float32:
            inverse = torch.full((), 1.0 / scale, dtype=dtype, device=self.storage.device)
        for decays in (True, False):
            chosen = [(run, each) for run, each in zip(runs, state, strict=True) if run.bucket.decays == decays]
            grads = [self.gradient(run) for run, _ in chosen]
            fused_adamw(
                [each for _, each in chosen],
                grads if scale == 1.0 or inverse is not None else [grad.mul_(scale) for grad in grads],
                [run.updates for run, _ in chosen],
                self.train,
                lr=self.schedule.rate(step),
                decays=decays,
                grad_scale=inverse,
            )
        copies: list[Copy] = []
        if self.keeps_masters:
            for run, (master, _, _) in zip(runs, state, strict=True):
                if run.weight_is_offloaded:
                    assert self.arena is not None
                    copies.append(self.arena.store(run.weight, master.to(run.weight.dtype)))
                else:
                    run.weight.copy_(master)
        return copies

    def reload_masters(self, read: Callable[[TensorInfo, Range], Tensor] | None = None) -> None:
        """Takes as masters the weights as they are now, after initial values were written; or what `read` gives of a
        run of a flattened stored tensor, (run.size,), which the weights were rounded from."""
        if self.keeps_masters:
            for run in self.runs:
                if read is None:
                    run.master.copy_(run.weight)
                    continue
                places = from_sizes(part.size for _, part in run.axis)
                for (placed, part), here in zip(run.axis, places, strict=True):
                    values = read(placed.info, part.shift(-placed.span.start))
                    run.master[here.start : here.stop].copy_(values)

    def set_updates(self, updates: int) -> None:
        """Continues bias correction as after `updates` updates."""
        for run in self.runs:
            run.updates.fill_(updates)

    @property
    def state_bytes(self) -> int:
        """Bytes of moments and masters of what this rank owns, wherever they lie."""
        per_element = (3 if self.keeps_masters else 2) * self.storage.grad_dtype.itemsize
        return per_element * sum(run.local.size for run in self.runs)

    @property
    def device_bytes(self) -> int:
        """Bytes of them that are on the device all the time."""
        return 0 if self._state_arena is not None else self.state_bytes


def _cut(run: Range, most: int) -> list[Range]:
    """The run in parts of `most` elements, the last of what is left."""
    return [Range(start, min(start + most, run.stop)) for start in range(run.start, run.stop, most)]


def _batches(runs: Sequence[OwnedRun], most: int) -> Iterator[list[OwnedRun]]:
    """Neighbouring runs of no more than `most` elements together."""
    batch, held = list[OwnedRun](), 0
    for run in runs:
        if batch and held + run.local.size > most:
            yield batch
            batch, held = [], 0
        batch.append(run)
        held += run.local.size
    if batch:
        yield batch
