"""Probes: small plans whose ranks show how memory grows with layers and microbatches. The memory model is read off them.

hethub.predictor.memory is asked separately for what stays on a rank and for what it holds while it computes. Each answer
is used for all modes that share it, and the two are added as the predictor adds them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hethub.planner.candidate.candidate import PLAIN, CandidateStage, Pattern
from hethub.planner.candidate.materialize import chunked
from hethub.predictor import rank_memory
from hethub.predictor.cost.cache import memoized
from hethub.predictor.cost.constants import is_cpu
from hethub.predictor.cost.software import HETHUB, element_bytes
from hethub.predictor.memory.parameters import rank_widths
from hethub.predictor.memory.peak import Moment, peak
from hethub.predictor.memory.ranks import Work, device_parts, work
from hethub.predictor.memory.shards import Shard
from hethub.predictor.memory.state import Moves, Resident, resident
from hethub.spec.accelerator import AcceleratorSpec, Precision
from hethub.spec.cluster import ClusterSpec, NodeSpec
from hethub.spec.layout.bind import Assignment, Layout
from hethub.spec.model import ModelSpec
from hethub.spec.plan import Offload, PlanSpec, Recompute, ReplicaSpec, StageSpec


class Load(NamedTuple):
    """What a replica holds when its memory is fullest."""

    micro_batch: int
    held: int  # microbatches


LOADS = (Load(1, 1), Load(1, 2), Load(4, 1), Load(64, 1))  # the replicas of a probe, one each
MOST_HELD = max(load.held for load in LOADS)
FEW, MANY = 2, len(LOADS)  # replicas of a probe, which share its state
ALL_STAGES = (3, 1)  # of probes: the first, a middle and the last of three, and one alone

PROBE = AcceleratorSpec(
    name="probe", vendor="probe", memory_gb=1, memory_gbytes_per_second=1, fp32_tflops=1, link_gbytes_per_second=1
)
ON_CPU = PROBE.replace(vendor="cpu")


def probe_for(accelerator: AcceleratorSpec) -> AcceleratorSpec:
    """Return the accelerator of probes that needs as much memory as this one. Its speeds mean nothing."""
    return ON_CPU if is_cpu(accelerator) else PROBE


class Mode(NamedTuple):
    """What decides, beside the micro-batch, how much state and how many activations a rank keeps."""

    recompute: Recompute = "none"
    zero: int = 1
    offload: tuple[Offload, ...] = ()
    pattern: Pattern = PLAIN

    @staticmethod
    def of(stage: CandidateStage, pattern: Pattern) -> "Mode":
        """Return the mode of a stage under a schedule. 1F1B, GPipe and interleaved share one, since they differ only in the
        number of microbatches in flight."""
        alike = pattern.schedule in ("gpipe", "interleaved")
        return Mode(stage.recompute, stage.zero, stage.offload, PLAIN if alike else pattern)

    @property
    def layers(self) -> int:
        """The smallest number of layers from which on a rank's bytes are linear in them. It is larger where only some layers
        are on the device at once: a layer with its neighbours, or a chunk."""
        schedule, chunks = self.pattern
        if schedule == "ministages":
            return 2 * chunks
        return 4 if self.zero >= 2 or self.offload or schedule == "layered" else 1

    @property
    def of_state(self) -> "Mode":
        """The part of the mode that decides what stays on a rank."""
        return Mode(zero=self.zero, offload=tuple(part for part in self.offload if part != "activations"))

    @property
    def of_work(self) -> "Mode":
        """The part of the mode that decides what microbatches need. How replicas shard the state is not in it."""
        return Mode(self.recompute, 0, ("activations",) if "activations" in self.offload else ())


class _ProbeLayout(Layout):
    """A probe's layout. Every replica holds as many microbatches in flight as its plan says."""

    @cached_property
    def in_flight(self) -> list[list[int]]:
        return [[replica.in_flight or 1 for replica in stage.replicas] for stage in self.stages]

    def passes_in_turn(self, stage: int) -> bool:
        """As the schedule says, whatever the number of microbatches, since the effect of one more is read off probes."""
        return self.plan.goes_chunk_by_chunk

    @property
    def actor_limits(self) -> list[list[int]]:
        return [held[:1] if self.plan.runs_in_rounds(stage) else held for stage, held in enumerate(self.in_flight)]


@dataclass(frozen=True)
class Probes:
    """Plans with a few layers in each stage under one schedule, whose replicas have `tp` ranks, and the bytes of these."""

    model: ModelSpec
    seq_len: int
    precision: Precision
    on_cpu: bool
    tp: int
    pattern: Pattern

    def bytes(self, layers: int, load: Load, mode: Mode, replicas: int = FEW) -> np.ndarray:
        """Return the bytes of a rank in each place: the first, a middle and the last of three stages, and the only one. Each
        stage has `layers` layers."""
        return np.array([held for n in ALL_STAGES for held in self._stage_bytes(n, layers, load, mode, replicas)])

    @memoized
    def shared_state(self, layers: int, mode: Mode) -> np.ndarray:
        """Return the bytes of state of the same ranks that replicas share, before they are divided; 0 at ZeRO-0. They are
        read off the smallest load."""
        if not mode.zero:
            return np.zeros(4)
        plain = mode._replace(recompute="none")
        few, many = (self.bytes(layers, LOADS[0], plain, replicas) for replicas in (FEW, MANY))
        return (few - many) / (1 / FEW - 1 / MANY)

    @memoized
    def deferred_wgrad(self, mode: Mode) -> float:
        """Return the bytes of one sample whose weights' gradients a layer puts off. It is how much more a second stage of
        one layer needs if the first one holds one microbatch more."""
        one, two = ((load,) * FEW for load in LOADS[:2])
        first, second = (
            rank_memory(self._layout([above, one, one], 1, mode), only=(FEW * self.tp,))[0].bytes
            for above in (one, two)
        )
        return float(second - first)

    def _stage_bytes(self, num_stages: int, layers: int, load: Load, mode: Mode, replicas: int) -> list[float]:
        """Return the bytes of a rank of each stage."""
        states = self._states(num_stages, layers, mode.of_state, replicas)
        found = self._at_work(num_stages, layers, load, mode.of_work, states[0][1].moves)
        return [
            float(sum(device_parts(shard, state, fullest, around).values()))
            for (shard, state), (fullest, around) in zip(states, found, strict=True)
        ]

    @memoized
    def _states(self, num_stages: int, layers: int, mode: Mode, replicas: int) -> list[tuple[Shard, Resident]]:
        """Return what stays on a rank of each stage."""
        return [
            (shard, resident(shard, _assignment(shard, 0), on_cpu=self.on_cpu))
            for shard in self._shards(num_stages, layers, mode, replicas)
        ]

    @memoized
    def _at_work(
        self, num_stages: int, layers: int, load: Load, mode: Mode, moves: Moves
    ) -> list[tuple[Moment, dict[str, float]]]:
        """Return the fullest moment of a rank of each stage and what surrounds it. Of the state, only the parts that move
        matter for it."""
        return [
            (peak(shard, place, needed.microbatches, moves), needed.around)
            for shard, place, needed in self._works(num_stages, layers, load, mode)
        ]

    @memoized
    def _works(self, num_stages: int, layers: int, load: Load, mode: Mode) -> list[tuple[Shard, Assignment, Work]]:
        """Return what microbatches need on a rank of each stage."""
        shards = self._shards(num_stages, layers, mode, MANY)
        places = [_assignment(shard, LOADS.index(load)) for shard in shards]
        return [
            (shard, place, work(shard, place, on_cpu=self.on_cpu)) for shard, place in zip(shards, places, strict=True)
        ]

    @memoized
    def _shards(self, num_stages: int, layers: int, mode: Mode, replicas: int) -> list[Shard]:
        """Return the first rank's part of each stage."""
        layout = self._layout([LOADS[:replicas]] * num_stages, layers, mode)
        width = element_bytes(HETHUB.math_precision(self.precision))
        widths = rank_widths(self.model, self.tp)[0]
        return [Shard(layout, stage, widths, HETHUB, width) for stage in range(num_stages)]

    def _layout(self, loads: Sequence[tuple[Load, ...]], layers: int, mode: Mode) -> Layout:
        """Return a plan with these replicas in each stage. It is neither checked nor bound, as only memory is asked of it."""
        cuts = chunked([layers] * len(loads), self.pattern.chunks)
        stages = tuple(
            StageSpec.model_construct(
                layers=cuts[stage],
                replicas=self._stage_replicas(stage, own),
                recompute=mode.recompute,
                zero=mode.zero,
                offload=mode.offload,
            )
            for stage, own in enumerate(loads)
        )
        plan = PlanSpec.model_construct(
            model=self.model.name,
            cluster=self._cluster.name,
            global_batch=sum(replica.samples for replica in stages[0].replicas),
            seq_len=self.seq_len,
            precision=self.precision,
            schedule=self.pattern.schedule,
            stages=stages,
        )
        return _ProbeLayout(plan, self.model, self._cluster)

    @cached_property
    def _cluster(self) -> ClusterSpec:
        """A cluster with enough accelerators for every probe."""
        node = NodeSpec(
            name="probe", accelerator=ON_CPU if self.on_cpu else PROBE, accelerators=max(ALL_STAGES) * MANY * self.tp
        )
        return ClusterSpec(name="probe", emulated=True, nodes=(node,))

    def _stage_replicas(self, stage: int, loads: tuple[Load, ...]) -> tuple[ReplicaSpec, ...]:
        """Return the replicas of a stage, one for each load. Under a schedule that runs all forwards first, a replica has no
        more microbatches than it holds; under others it has more."""
        all_held, tp = self.pattern.holds_all, self.tp
        return tuple(
            ReplicaSpec(
                ranks=tuple(range(index * tp, (index + 1) * tp)),
                micro_batch=load.micro_batch,
                samples=load.micro_batch * (load.held if all_held else 2 * MOST_HELD),
                in_flight=load.held,
            )
            for index, load in enumerate(loads, stage * len(loads))
        )


def _assignment(shard: Shard, replica: int) -> Assignment:
    """Return the assignment of the first rank of a replica."""
    return Assignment(shard.spec.replicas[replica].ranks[0], shard.stage, replica, 0)
