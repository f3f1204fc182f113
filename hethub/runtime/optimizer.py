"""AdamW on the elements a rank owns, with the global norm, clipping and dynamic loss scaling."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hethub.runtime.reduction import Reducer
from hethub.runtime.storage import FlatStorage
from hethub.spec.job import TrainSpec
from hethub.spec.ranges import Range


def learning_rate(train: TrainSpec, step: int) -> float:
    """The rate of `step` (counted from 1): linear warm-up to lr, then a cosine down to min_lr at the last step."""
    if step <= train.warmup_steps:
        return train.lr * step / train.warmup_steps
    progress = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    return train.min_lr + (train.lr - train.min_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


@dataclass(frozen=True)
class OwnedRun:
    """A run of local storage that this rank steps, and what the optimizer updates for it."""

    local: Range
    decays: bool
    counts: bool  # in the gradient norm: another rank may step the same elements without sharding
    master: torch.nn.Parameter


class Optimizer:
    """AdamW over the owned runs of a rank's storage; half precisions keep fp32 masters.

    torch's fused AdamW does the arithmetic. Every element has one owner that counts it in the norm.
    """

    def __init__(self, storage: FlatStorage, reducer: Reducer, train: TrainSpec) -> None:
        self.storage, self.train = storage, train
        self.updates = 0  # steps taken, on every rank, also one that steps nothing
        self.keeps_masters = storage.weights.dtype != storage.grads.dtype
        self.runs = [
            self._run(local, piece.decays, piece.piece.group.sharded or piece.first_contributor == storage.seat.rank)
            for piece in reducer.pieces
            for local in piece.owned
        ]
        groups = [
            {
                "params": [run.master for run in self.runs if run.decays == decays],
                "weight_decay": train.weight_decay * decays,
            }
            for decays in (True, False)
        ]
        groups = [group for group in groups if group["params"]]
        self._adamw = (
            torch.optim.AdamW(groups, lr=train.lr, betas=train.betas, eps=train.eps, fused=True) if groups else None
        )

    def _run(self, local: Range, decays: bool, counts: bool) -> OwnedRun:
        weights = self.storage.weights[local.start : local.stop]
        master = torch.nn.Parameter(weights.float() if self.keeps_masters else weights)
        return OwnedRun(local, decays, counts, master)

    def square_sum(self) -> Tensor:
        """The sum of squares of the gradients this rank counts, 0-d in fp64 (inf or nan where one of them is)."""
        parts = [self.storage.grads[run.local.start : run.local.stop] for run in self.runs if run.counts]
        total = torch.zeros((), dtype=torch.float64, device=self.storage.grads.device)
        for part in parts:
            total += torch.linalg.vector_norm(part).double().square()
        return total

    def step(self, step: int, scale: float) -> None:
        """One AdamW update with gradients multiplied by `scale` (clipping, loss scale)."""
        self.updates += 1
        if self._adamw is None:
            return
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate(self.train, step)
        for run in self.runs:
            grad = self.storage.grads[run.local.start : run.local.stop]
            run.master.grad = grad if scale == 1.0 else grad.mul_(scale)
        self._adamw.step()
        if self.keeps_masters:
            self.write_weights()

    def write_weights(self) -> None:
        """Rounds the masters into the weights."""
        if self.keeps_masters:
            with torch.no_grad():
                for run in self.runs:
                    self.storage.weights[run.local.start : run.local.stop].copy_(run.master)

    def reload_masters(self) -> None:
        """Takes the weights as they are now, after initial values were written, as masters."""
        if self.keeps_masters:
            with torch.no_grad():
                for run in self.runs:
                    run.master.copy_(self.storage.weights[run.local.start : run.local.stop])

    def moments(self, run: OwnedRun) -> tuple[Tensor, Tensor]:
        """First and second moment of an owned run; zeros before the first step."""
        assert self._adamw is not None
        state = self._adamw.state[run.master]
        if not state:
            state.update(self._fresh(run))
        return state["exp_avg"], state["exp_avg_sq"]

    def _fresh(self, run: OwnedRun) -> dict[str, Tensor]:
        return {
            "step": torch.zeros((), dtype=torch.float32, device=run.master.device),
            "exp_avg": torch.zeros_like(run.master),
            "exp_avg_sq": torch.zeros_like(run.master),
        }

    def set_updates(self, updates: int) -> None:
        """Continues bias correction as after `updates` updates."""
        self.updates = updates
        for run in self.runs:
            self.moments(run)
            self._adamw.state[run.master]["step"].fill_(updates)  # type: ignore[union-attr]

    @property
    def state_bytes(self) -> int:
        """Bytes of moments and masters this rank holds."""
        per_element = 2 * self.storage.grads.element_size() + (4 if self.keeps_masters else 0)
        return per_element * sum(run.local.size for run in self.runs)


class LossScale:
    """Dynamic loss scaling for fp16: halved after an overflow, doubled after `patience` good steps; 1 elsewhere."""

    def __init__(self, precision: str, *, initial: float = 2.0**16, patience: int = 1000) -> None:
        self.dynamic = precision == "fp16"
        self.value = initial if self.dynamic else 1.0
        self.good_steps, self._patience = 0, patience

    @property
    def is_lowest(self) -> bool:
        """Whether an overflow cannot be the scale's fault; always so where there is no scaling."""
        return self.value == 1.0

    def update(self, *, overflow: bool) -> None:
        """Every rank calls it with the same verdict, so all keep the same scale."""
        if not self.dynamic:
            return
        self.good_steps = 0 if overflow else self.good_steps + 1
        if overflow:
            self.value = max(1.0, self.value / 2)
        elif self.good_steps == self._patience:
            self.value, self.good_steps = self.value * 2, 0


def clip_scale(norm: float, limit: float | None) -> float:
    """The factor that brings a gradient of this norm down to `limit`, as torch.nn.utils.clip_grad_norm_ computes it."""
    return 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))


def ordered_sum(values: Sequence[float]) -> float:
    """The sum in the order given, the same bits on every rank that has the same values."""
    total = 0.0
    for value in values:
        total += value
    return total
