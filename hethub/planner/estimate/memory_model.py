"""Estimate a rank's memory from coefficients that are read off the predictor's own memory on small probes.

A rank's bytes grow linearly with its layers and with the microbatches it holds, and almost linearly with the
micro-batch. The part that ZeRO shards is divided by the number of replicas. So a few probes of
hethub.predictor.memory.ranks are enough for the bytes of any stage, and they stay right when the predictor's memory
changes. The predictor itself evaluates every answer.
"""

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np

from hethub.planner.candidate.candidate import PLAIN, Pattern
from hethub.planner.estimate.memory_probes import FEW, Load, Mode, Probes
from hethub.planner.problem.problem import Problem
from hethub.predictor.cost.cache import memoized
from hethub.predictor.cost.software import HETHUB, element_bytes
from hethub.predictor.memory.parameters import RankParameters, rank_widths
from hethub.predictor.memory.state import optimizer_bytes
from hethub.spec.accelerator import Precision
from hethub.spec.model import ModelSpec
from hethub.spec.plan import Offload

FIRST, MIDDLE, LAST, ONLY = range(4)
ENDS = ((True, False), (False, False), (False, True), (True, True))  # whether embedding and head are there
PROBED_MICRO_BATCHES = (1, 4, 64)


@cache
def places(count: int) -> tuple[int, ...]:
    """Return the place of each of `count` stages (FIRST, MIDDLE, LAST or ONLY), an index of a coefficient's last axis."""
    return tuple(ENDS.index((stage == 0, stage == count - 1)) for stage in range(count))


class Coefficients(NamedTuple):
    """Coefficients of a rank's bytes, each an array by place.

    With x layers and k microbatches in flight a rank needs once + layer * x + microbatch * k + layer_microbatch * x * k.
    To this come state_once + state_layer * x, which ZeRO divides by the number of shards, and layer_deferred_wgrad * x
    for each microbatch whose weights' gradients zero_bubble puts off."""

    once: np.ndarray
    layer: np.ndarray
    microbatch: np.ndarray
    layer_microbatch: np.ndarray
    state_once: np.ndarray
    state_layer: np.ndarray
    layer_deferred_wgrad: np.ndarray

    def along(self, other: "Coefficients", part: float) -> "Coefficients":
        """Return the coefficients at a `part` of the way from these to others."""
        return Coefficients(*(one + part * (two - one) for one, two in zip(self, other, strict=True)))

    def most_layers(self, held: np.ndarray, shards: "int | np.ndarray", capacity: "float | np.ndarray") -> np.ndarray:
        """Return how many layers, and parts of one, fit into `capacity` bytes with `held` microbatches in flight and state
        cut into `shards`."""
        per_layer = self.layer + held * self.layer_microbatch + self.state_layer / shards
        return (capacity - (self.once + held * self.microbatch + self.state_once / shards)) / per_layer


@dataclass(frozen=True)
class MemoryModel:
    """The coefficients of one model, sequence length and precision."""

    model: ModelSpec
    seq_len: int
    precision: Precision

    @memoized
    def coefficients(self, on_cpu: bool, tp: int, micro_batch: int, mode: Mode) -> Coefficients:
        """Return the coefficients of one of `tp` ranks, interpolated between the probed micro-batches. They are the same for
        all accelerators but CPUs."""
        if "optimizer" in mode.offload:
            others: tuple[Offload, ...] = tuple(part for part in mode.offload if part != "optimizer")
            plain = self.coefficients(on_cpu, tp, micro_batch, mode._replace(offload=others))
            return self._without_optimizer(plain, tp, mode.zero)
        if mode.pattern.defers_wgrad:  # which keeps as much as without, but for what is put off
            plain = self.coefficients(on_cpu, tp, micro_batch, mode._replace(pattern=PLAIN))
            if "activations" in mode.offload:  # what is put off waits in host memory
                return plain
            late = self._probes(on_cpu, tp, mode.pattern).deferred_wgrad(mode)
            return plain._replace(layer_deferred_wgrad=np.full(4, micro_batch * late))
        if micro_batch in PROBED_MICRO_BATCHES:
            one = None if micro_batch == 1 else self.coefficients(on_cpu, tp, 1, mode)
            return _read(self._probes(on_cpu, tp, mode.pattern), micro_batch, mode, one)
        low = max(b for b in PROBED_MICRO_BATCHES[:-1] if b <= micro_batch)
        high = PROBED_MICRO_BATCHES[PROBED_MICRO_BATCHES.index(low) + 1]
        a, b = (self.coefficients(on_cpu, tp, size, mode) for size in (low, high))
        return a.along(b, (micro_batch - low) / (high - low))

    def _without_optimizer(self, plain: Coefficients, tp: int, zero: int) -> Coefficients:
        """Return the coefficients where the optimizer's state is in host memory. What a step brings back to the device is
        not counted, since by then the memory of computing is free."""
        rank = RankParameters.of(self.model, rank_widths(self.model, tp)[0])
        each = optimizer_bytes(element_bytes(HETHUB.math_precision(self.precision)))
        once = each * np.array([rank.of_layers(0, *ends) for ends in ENDS], dtype=float)
        layer = each * float(rank.of_layers(1, False, False))
        if zero:
            return plain._replace(state_once=plain.state_once - once, state_layer=plain.state_layer - layer)
        return plain._replace(once=plain.once - once, layer=plain.layer - layer)

    def state(self, on_cpu: bool, layers: int, zero: int) -> float:
        """Return the bytes of state that replicas of one rank share, of a pipeline of one stage and before they are divided.
        At ZeRO-0 there are none."""
        return float(self._probes(on_cpu, 1, PLAIN).shared_state(layers, Mode(zero=zero))[ONLY])

    @memoized
    def _probes(self, on_cpu: bool, tp: int, pattern: Pattern) -> Probes:
        return Probes(self.model, self.seq_len, self.precision, on_cpu, tp, pattern)


def _read(probes: Probes, micro_batch: int, mode: Mode, one: Coefficients | None) -> Coefficients:
    """Compute coefficients from probes with few layers and twice as many, and with one and two microbatches in flight.
    What microbatches of `one` sample need is scaled for larger ones."""
    few, many = mode.layers, 2 * mode.layers
    state = {x: probes.shared_state(x, mode) for x in (few, many)}
    rest = {x: probes.bytes(x, Load(micro_batch, 1), mode) - state[x] / FEW for x in (few, many)}
    if one is None:
        two = {x: probes.bytes(x, Load(1, 2), mode) - state[x] / FEW for x in (few, many)}
        layer_microbatch = (two[many] - rest[many] - two[few] + rest[few]) / few
        microbatch = two[few] - rest[few] - few * layer_microbatch
    else:
        layer_microbatch, microbatch = micro_batch * one.layer_microbatch, micro_batch * one.microbatch
    layer = (rest[many] - rest[few]) / few - layer_microbatch
    once = rest[few] - few * (layer + layer_microbatch) - microbatch
    state_layer = (state[many] - state[few]) / few
    state_once = state[few] - few * state_layer
    return Coefficients(once, layer, microbatch, layer_microbatch, state_once, state_layer, np.zeros(4))


def memory_model_of(problem: Problem) -> MemoryModel:
    """Return a problem's memory model. Its probes are kept for the same model on other clusters and under other batches and
    constraints."""
    return _kept(problem.model, problem.batch.seq_len, problem.batch.precision)


_kept = lru_cache(maxsize=8)(MemoryModel)
