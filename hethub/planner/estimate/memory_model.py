"""Bytes of a rank by its number of layers: coefficients read off the predictor's own memory on small probes.

A rank's bytes are linear in its layers and in the microbatches it holds, and nearly so in the micro-batch; what ZeRO
cuts falls with the replicas that share it. So a few probes of hethub.predictor.memory.ranks give every stage's bytes
without a plan, and stay true when the predictor's memory changes. The predictor evaluates every answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from hethub.planner.candidate.candidate import CandidateStage, Pattern
from hethub.planner.candidate.materialize import chunked
from hethub.planner.problem.problem import Problem
from hethub.predictor import rank_memory
from hethub.predictor.cost.constants import is_cpu
from hethub.predictor.cost.software import HETHUB, element_bytes
from hethub.predictor.memory.parameters import RankParameters, rank_widths
from hethub.predictor.memory.state import optimizer_bytes
from hethub.spec.accelerator import AcceleratorSpec, Precision
from hethub.spec.cluster import ClusterSpec, NodeSpec
from hethub.spec.layout.bind import Layout
from hethub.spec.model import ModelSpec
from hethub.spec.plan import Offload, PlanSpec, Recompute, ReplicaSpec, ScheduleName, StageSpec

FIRST, MIDDLE, LAST, ONLY = range(4)
ENDS = ((True, False), (False, False), (False, True), (True, True))  # whether embedding and head are there
PROBED_MICRO_BATCHES = (1, 4, 64)
NEVER = 1 << 40


def position(first: bool, last: bool) -> int:
    """Where a stage is, as an index of a coefficient's last axis."""
    return ONLY if first and last else FIRST if first else LAST if last else MIDDLE


class Mode(NamedTuple):
    """What beside micro-batch and recompute decides how much a rank keeps."""

    zero: int = 1
    schedule: ScheduleName = "1f1b"
    chunks: int = 1
    offload: tuple[Offload, ...] = ()

    @staticmethod
    def of(stage: CandidateStage, pattern: Pattern) -> "Mode":
        """A stage's under a schedule. What 1F1B, GPipe and interleaved hold differs in the number of microbatches
        alone."""
        alike = pattern.schedule in ("gpipe", "interleaved")
        schedule, chunks = Pattern("1f1b") if alike else pattern
        return Mode(stage.zero, schedule, chunks, stage.offload)

    @property
    def layers(self) -> int:
        """The fewest layers from which on a rank's bytes are linear in them: two where a layer's neighbours lie beside
        it, one more where the state of a chunk alone is at hand."""
        if self.schedule == "ministages":
            return 2 * self.chunks
        return 4 if self.zero >= 2 or self.offload or self.schedule == "layered" else 1


class Coefficients(NamedTuple):
    """Bytes of a rank: once + layer * x + microbatch * k + layer_microbatch * x * k for x layers and k microbatches
    held, by position; the shared state of a rank without sharding: state_once + state_layer * x; and
    layer_deferred_wgrad * x for every microbatch whose weights' gradients zero_bubble puts off."""

    once: np.ndarray
    layer: np.ndarray
    microbatch: np.ndarray
    layer_microbatch: np.ndarray
    state_once: np.ndarray
    state_layer: np.ndarray
    layer_deferred_wgrad: np.ndarray

    def along(self, other: "Coefficients", part: float) -> "Coefficients":
        """Those on the line to others, a `part` of the way."""
        return Coefficients(*(one + part * (two - one) for one, two in zip(self, other, strict=True)))

    def grown(self, micro_batch: int, small: "Coefficients", large: "Coefficients") -> "Coefficients":
        """Those of larger microbatches, where those of one sample and of so many are known of another mode."""
        return self._replace(
            once=self.once + large.once - small.once,
            layer=self.layer + large.layer - small.layer,
            microbatch=micro_batch * self.microbatch,
            layer_microbatch=micro_batch * self.layer_microbatch,
        )

    def fixed(self, layers: "int | np.ndarray", held: "int | np.ndarray", place: int) -> "float | np.ndarray":
        """Bytes whatever the replicas."""
        return (
            self.once[place]
            + self.layer[place] * layers
            + held * (self.microbatch[place] + self.layer_microbatch[place] * layers)
        )

    def state(self, layers: "int | np.ndarray", place: int) -> "float | np.ndarray":
        """Bytes of state, before replicas share it."""
        return self.state_once[place] + self.state_layer[place] * layers

    def least_replicas(
        self, layers: int, held: "int | np.ndarray", place: int, capacity: float, sharded: bool
    ) -> np.ndarray:
        """For 0, 1, … `layers` layers, the fewest replicas with which a rank fits; a huge number where none do.
        Microbatches held may be [case, 1]."""
        each = np.arange(layers + 1)
        room, state = capacity - self.fixed(each, held, place), self.state(each, place)
        if not sharded:
            return np.where(room >= state, 1, NEVER)
        with np.errstate(divide="ignore", invalid="ignore"):
            needed = np.ceil(state / room)
        return np.where(room > 0, np.maximum(1, needed), NEVER).astype(np.int64)


@dataclass(frozen=True)
class MemoryModel:
    """Coefficients for one model, sequence length and precision, each probed once."""

    model: ModelSpec
    seq_len: int
    precision: Precision
    _known: dict[tuple[bool, int, int, Recompute, Mode], Coefficients] = field(default_factory=dict)
    _shared: dict[tuple[bool, int, Mode], dict[int, np.ndarray]] = field(default_factory=dict)
    _late: dict[tuple[bool, int, Recompute, Mode], float] = field(default_factory=dict)
    _alone: dict[tuple[bool, int, int], float] = field(default_factory=dict)

    def coefficients(
        self, accelerator: AcceleratorSpec, tp: int, micro_batch: int, recompute: Recompute, mode: Mode
    ) -> Coefficients:
        """For one of `tp` ranks; between probed micro-batches by interpolation. Memory tells accelerators apart only by
        whether they are CPUs."""
        key = (is_cpu(accelerator), tp, micro_batch, recompute, mode)
        if key not in self._known:
            self._known[key] = self._find(accelerator, tp, micro_batch, recompute, mode)
        return self._known[key]

    def _find(
        self, accelerator: AcceleratorSpec, tp: int, micro_batch: int, recompute: Recompute, mode: Mode
    ) -> Coefficients:
        if "optimizer" in mode.offload:
            others: tuple[Offload, ...] = tuple(part for part in mode.offload if part != "optimizer")
            plain = self.coefficients(accelerator, tp, micro_batch, recompute, mode._replace(offload=others))
            return self._without_optimizer(plain, tp, mode.zero)
        if mode.schedule == "zero_bubble":  # which keeps as much as without, but for what is put off
            plain = self.coefficients(accelerator, tp, micro_batch, recompute, mode._replace(schedule="1f1b"))
            probe = _Probe(self, probe_for(accelerator), tp, 1, recompute, mode)
            return plain._replace(layer_deferred_wgrad=np.full(4, micro_batch * self._deferred_wgrad(probe)))
        plainly = Mode(mode.zero)
        if micro_batch > 1 and mode != plainly and "activations" not in mode.offload:
            # What a mode keeps of the state does not depend on the microbatches.
            own, small, large = (
                self.coefficients(accelerator, tp, size, recompute, of)
                for size, of in ((1, mode), (1, plainly), (micro_batch, plainly))
            )
            return own.grown(micro_batch, small, large)
        if micro_batch > PROBED_MICRO_BATCHES[1] and mode != plainly:
            first, few = (self.coefficients(accelerator, tp, b, recompute, mode) for b in PROBED_MICRO_BATCHES[:2])
            return first.along(few, (micro_batch - 1) / (PROBED_MICRO_BATCHES[1] - 1))
        if micro_batch in PROBED_MICRO_BATCHES:
            probe = _Probe(self, probe_for(accelerator), tp, micro_batch, recompute, mode)
            one = None if micro_batch == 1 else self.coefficients(accelerator, tp, 1, recompute, mode)
            return probe.coefficients(self._state(probe), one)
        low = max(b for b in PROBED_MICRO_BATCHES[:-1] if b <= micro_batch)
        high = PROBED_MICRO_BATCHES[PROBED_MICRO_BATCHES.index(low) + 1]
        a, b = (self.coefficients(accelerator, tp, size, recompute, mode) for size in (low, high))
        return a.along(b, (micro_batch - low) / (high - low))

    def _without_optimizer(self, plain: Coefficients, tp: int, zero: int) -> Coefficients:
        """What is left where the optimizer's state is in host memory. What its step brings back is left out: it comes
        when what computing needed is gone."""
        rank = RankParameters.of(self.model, rank_widths(self.model, tp)[0])
        width = element_bytes(HETHUB.math_precision(self.precision))
        one, two = (
            optimizer_bytes(width) * np.array([rank.of_layers(layers, *ends) for ends in ENDS], dtype=float)
            for layers in (1, 2)
        )
        layer = two - one
        if zero:
            return plain._replace(state_once=plain.state_once - (one - layer), state_layer=plain.state_layer - layer)
        return plain._replace(once=plain.once - (one - layer), layer=plain.layer - layer)

    def _deferred_wgrad(self, probe: "_Probe") -> float:
        """Bytes that a layer puts off of one sample."""
        key = (is_cpu(probe.accelerator), probe.tp, probe.recompute, probe.mode)
        if key not in self._late:
            self._late[key] = probe.deferred_wgrad()
        return self._late[key]

    def state(self, accelerator: AcceleratorSpec, layers: int, zero: int) -> float:
        """Bytes of a stage alone, of one-rank replicas, before these share them; at ZeRO-0 they share none."""
        key = (is_cpu(accelerator), layers, zero)
        if key not in self._alone:
            probe = _Probe(self, probe_for(accelerator), 1, 1, "none", Mode(zero))
            self._alone[key] = probe.state_alone(layers)
        return self._alone[key]

    def _state(self, probe: "_Probe") -> dict[int, np.ndarray]:
        """By layers, the state before replicas share it, whatever the microbatches and recompute."""
        key = (is_cpu(probe.accelerator), probe.tp, probe.mode)
        if key not in self._shared:
            self._shared[key] = replace(probe, micro_batch=1, recompute="none").state()
        return self._shared[key]


def memory_model_of(problem: Problem) -> MemoryModel:
    """The one of a question: its probes are kept for other clusters, batches and constraints."""
    return _kept(problem.model, problem.batch.seq_len, problem.batch.precision)


@lru_cache(maxsize=8)
def _kept(model: ModelSpec, seq_len: int, precision: Precision) -> MemoryModel:
    return MemoryModel(model, seq_len, precision)


class _ProbeLayout(Layout):
    """A probe's layout: every replica holds as many microbatches as its plan says, which nobody needs to deal out."""

    @cached_property
    def in_flight(self) -> list[list[int]]:
        return [[replica.in_flight or 1 for replica in stage.replicas] for stage in self.stages]

    @property
    def actor_limits(self) -> list[list[int]]:
        return [held[:1] if self.plan.runs_in_rounds(stage) else held for stage, held in enumerate(self.in_flight)]


@dataclass(frozen=True)
class _Probe:
    """Plans of a few layers whose memory tells the coefficients."""

    memory_model: MemoryModel
    accelerator: AcceleratorSpec
    tp: int
    micro_batch: int
    recompute: Recompute
    mode: Mode

    def coefficients(self, state: dict[int, np.ndarray], one: Coefficients | None) -> Coefficients:
        """From few and twice as many layers, one and two microbatches in flight. Those of microbatches of `one` sample are known
        for more."""
        few = self.mode.layers
        many = 2 * few
        rest = {x: self._bytes(x, 1, FEW) - state[x] / FEW for x in (few, many)}
        if one is None:
            two = {x: self._bytes(x, 2, FEW) - state[x] / FEW for x in (few, many)}
            layer_microbatch = (two[many] - rest[many] - two[few] + rest[few]) / few
            microbatch = two[few] - rest[few] - few * layer_microbatch
        else:
            layer_microbatch, microbatch = self.micro_batch * one.layer_microbatch, self.micro_batch * one.microbatch
        layer = (rest[many] - rest[few]) / few - layer_microbatch
        once = rest[few] - few * (layer + layer_microbatch) - microbatch
        state_layer = (state[many] - state[few]) / few
        return Coefficients(
            once, layer, microbatch, layer_microbatch, state[few] - few * state_layer, state_layer, np.zeros(4)
        )

    def deferred_wgrad(self) -> float:
        """Bytes that one more microbatch on the first stage lets the second one, of one layer, put off."""
        first, second = (self._ranks(1, held, FEW)[1] for held in ((1, 1, 1), (2, 1, 1)))
        return float(second - first)

    def state(self) -> dict[int, np.ndarray]:
        """From two and four replicas, which share it."""
        layers = (self.mode.layers, 2 * self.mode.layers)
        if not self.mode.zero:
            return {x: np.zeros(4) for x in layers}
        return {x: (self._bytes(x, 1, FEW) - self._bytes(x, 1, MANY)) / (1 / FEW - 1 / MANY) for x in layers}

    def state_alone(self, layers: int) -> float:
        """The same of a stage alone with so many layers."""
        few, many = (self._ranks(layers, (1,), replicas)[0] for replicas in (FEW, MANY))
        return (few - many) / (1 / FEW - 1 / MANY) if self.mode.zero else 0.0

    def _bytes(self, layers: int, held: int, replicas: int) -> np.ndarray:
        """Bytes of a rank of the first, a middle and the last of three stages, and of a stage alone."""
        three, one = (self._ranks(layers, (held,) * stages, replicas) for stages in (3, 1))
        return np.array([*three, *one], dtype=float)

    def _ranks(self, layers: int, held: Sequence[int], replicas: int) -> list[int]:
        """Bytes of a rank of each stage, which hold so many microbatches."""
        stages = len(held)
        model, tp = self.memory_model.model.replace(layers=stages * layers), self.tp
        all_held = self.mode.schedule in ("layered", "ministages")
        samples = self.micro_batch * (held[0] if all_held else 4)
        cuts = chunked([layers] * stages, self.mode.chunks)
        node = NodeSpec(name="probe", accelerator=self.accelerator, accelerators=stages * replicas * tp)
        cluster = ClusterSpec(name="probe", emulated=True, nodes=(node,))
        formed = [
            StageSpec(
                layers=cuts[s],
                replicas=tuple(
                    ReplicaSpec(
                        ranks=tuple(range(r * tp, (r + 1) * tp)),
                        micro_batch=self.micro_batch,
                        samples=samples,
                        in_flight=held[s],
                    )
                    for r in range(s * replicas, (s + 1) * replicas)
                ),
                recompute=self.recompute,
                zero=self.mode.zero,
                offload=self.mode.offload,
            )
            for s in range(stages)
        ]
        plan = PlanSpec(
            model=model.name,
            cluster=cluster.name,
            global_batch=replicas * samples,
            seq_len=self.memory_model.seq_len,
            precision=self.memory_model.precision,
            schedule=self.mode.schedule,
            stages=tuple(formed),
        )
        firsts = range(0, stages * replicas * tp, replicas * tp)
        return [one.bytes for one in rank_memory(_ProbeLayout(plan, model, cluster), only=firsts)]


FEW, MANY = 2, 4  # replicas of a probe

ON_CPU = AcceleratorSpec(
    name="probe", vendor="cpu", memory_gb=1, memory_gbytes_per_second=1, fp32_tflops=1, link_gbytes_per_second=1
)
PROBE = AcceleratorSpec(
    name="probe", vendor="probe", memory_gb=1, memory_gbytes_per_second=1, fp32_tflops=1, link_gbytes_per_second=1
)


def probe_for(accelerator: AcceleratorSpec) -> AcceleratorSpec:
    """An accelerator without a speed that needs as much memory."""
    return ON_CPU if is_cpu(accelerator) else PROBE
