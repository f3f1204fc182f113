"""A plan bound to its model and cluster: everything a rank or a simulator derives from it, checked as a whole."""

import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

from hethub.spec.accelerator import Precision
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput
from hethub.spec.layout.tensors import RankShares, rank_shares
from hethub.spec.model import ModelSpec
from hethub.spec.plan import SCHEDULES, PlanSpec, ReplicaSpec, StageSpec
from hethub.spec.ranges import Range
from hethub.spec.schedule.in_flight import even_limits, in_flight_limits, is_even, is_regular
from hethub.spec.schedule.interleaved import interleave, interleave_regular, most_held
from hethub.spec.schedule.microbatches import (
    Load,
    Microbatching,
    MicrobatchRange,
    Transfer,
    as_one_replica,
    deal,
    load_alone,
    loads,
    rounds,
    transfers,
)
from hethub.spec.schedule.orders import ActorOrder


class Assignment(NamedTuple):
    """A rank's place in the plan."""

    rank: int
    stage: int
    replica: int
    position: int  # within the replica


class ModelChunk(NamedTuple):
    """A chunk of a stage: the layers that one forward or backward of it runs."""

    stage: int
    chunk: int
    layers: Range


class Boundary(NamedTuple):
    """Two neighbouring model chunks on different stages and what one hands to the other; gradients go the other way."""

    source: ModelChunk
    target: ModelChunk
    transfers: tuple[Transfer, ...]


@dataclass(frozen=True, eq=False)
class Layout:
    """A plan that fits its model and cluster. Build it with `bind`, which checks; then everything here is
    consistent."""

    plan: PlanSpec
    model: ModelSpec
    cluster: ClusterSpec

    def on(self, cluster: ClusterSpec) -> "Layout":
        """Return the layout on a cluster with other figures. How samples are dealt does not depend on figures, so it is kept."""
        layout = copy.copy(self)
        object.__setattr__(layout, "cluster", cluster)
        return layout

    @cached_property
    def stages(self) -> tuple[StageSpec, ...]:
        return self.plan.stages

    @cached_property
    def num_stages(self) -> int:
        return len(self.plan.stages)

    def replica(self, stage: int, replica: int) -> ReplicaSpec:
        return self.plan.stages[stage].replicas[replica]

    def largest_microbatch(self, stage: int, replica: int) -> int:
        """Samples of a replica's largest microbatch: its micro-batch, or all samples that it has."""
        return load_alone(self.replica(stage, replica)).largest

    @cached_property
    def assignments(self) -> tuple[Assignment, ...]:
        """One assignment per rank that is used, in rank order."""
        assignments = [
            Assignment(rank, s, r, position)
            for s, stage in enumerate(self.plan.stages)
            for r, replica in enumerate(stage.replicas)
            for position, rank in enumerate(replica.ranks)
        ]
        return tuple(sorted(assignments))

    @cached_property
    def assignment_of(self) -> dict[int, Assignment]:
        """The assignment of each rank. Unused ranks have none."""
        return {assignment.rank: assignment for assignment in self.assignments}

    @cached_property
    def microbatches(self) -> tuple[tuple[MicrobatchRange, ...], ...]:
        """The microbatches of each stage, in the order of the sample axis."""
        return tuple(microbatching.microbatches(stage) for stage, microbatching in enumerate(self.microbatchings))

    @cached_property
    def microbatchings(self) -> tuple[Microbatching, ...]:
        """The microbatches of each stage, as columns."""
        return tuple(deal(stage.replicas) for stage in self.plan.stages)

    def microbatches_of(self, stage: int, replica: int) -> tuple[MicrobatchRange, ...]:
        """A replica's microbatches in order."""
        return self._microbatches_by_replica[stage][replica]

    @cached_property
    def _microbatches_by_replica(self) -> tuple[tuple[tuple[MicrobatchRange, ...], ...], ...]:
        result = []
        for stage, microbatches in zip(self.plan.stages, self.microbatches, strict=True):
            own: list[list[MicrobatchRange]] = [[] for _ in stage.replicas]
            for microbatch in microbatches:
                own[microbatch.replica].append(microbatch)
            result.append(tuple(map(tuple, own)))
        return tuple(result)

    @cached_property
    def actors(self) -> tuple[Microbatching, ...]:
        """The microbatches of each stage as schedules see them: its own, or its rounds, as if they were microbatches of one
        replica."""
        return tuple(
            as_one_replica(microbatching) if self.plan.runs_in_rounds(stage) else microbatching
            for stage, microbatching in enumerate(self.microbatchings)
        )

    def actor_of(self, stage: int, replica: int) -> int:
        """Return the actor of a replica: one of its own, or the stage's first, which stands for all its replicas."""
        return 0 if self.plan.runs_in_rounds(stage) else replica

    def passes_in_turn(self, stage: int) -> bool:
        """Return what the plan says. Only memory probes say something else, since their microbatches are not dealt out."""
        return self.plan.passes_in_turn(stage)

    @cached_property
    def loads(self) -> tuple[list[Load], ...]:
        """The microbatches and samples of each stage and actor."""
        return tuple(
            self._loads_in_rounds(stage) if self.plan.runs_in_rounds(stage) else list(map(load_alone, spec.replicas))
            for stage, spec in enumerate(self.stages)
        )

    def _loads_in_rounds(self, stage: int) -> list[Load]:
        own = list(map(load_alone, self.stages[stage].replicas))
        if len(set(own)) > 1:
            return loads(self.actors[stage])
        return [Load(own[0].num_microbatches, len(own) * own[0].samples, len(own) * own[0].largest)]

    def actor_microbatches(self, stage: int, replica: int) -> tuple[MicrobatchRange | None, ...]:
        """The replica's own microbatch of each microbatch of its actor; None for a round that has none for it."""
        if not self.plan.runs_in_rounds(stage):
            return self.microbatches_of(stage, replica)
        own: list[MicrobatchRange | None] = [None] * self.loads[stage][0].num_microbatches
        for number, microbatch in zip(
            self.round_numbers(stage, replica), self.microbatches_of(stage, replica), strict=True
        ):
            own[number] = microbatch
        return tuple(own)

    def round_numbers(self, stage: int, replica: int) -> list[int]:
        """The round of each of a replica's microbatches."""
        return self._round_numbers[stage][replica]

    def joins_every_round(self, stage: int, replica: int) -> bool:
        """Whether a replica of a stage in rounds has a microbatch in each of them."""
        return load_alone(self.replica(stage, replica)).num_microbatches == self.loads[stage][0].num_microbatches

    @cached_property
    def _round_numbers(self) -> dict[int, list[list[int]]]:
        """The rounds of each replica's microbatches, for the stages that run in rounds."""
        found = {}
        for stage, spec in enumerate(self.stages):
            if self.plan.runs_in_rounds(stage):
                replicas = self.microbatchings[stage].replicas
                numbers: list[list[int]] = [[] for _ in spec.replicas]
                for number, turn in enumerate(rounds(replicas)):
                    for replica in replicas[turn.start : turn.stop]:
                        numbers[replica].append(number)
                found[stage] = numbers
        return found

    @cached_property
    def in_flight(self) -> list[list[int]]:
        """The most microbatches that each stage and replica holds before their backward; of a stage in rounds, the most
        that are under way.

        Under interleaved a microbatch counts once for every chunk that it is held in; under ministages and layered,
        where all microbatches are held in all chunks, it counts once.
        """
        limits, chunks = self.actor_limits, self.plan.num_chunks
        return [
            [
                min(limits[stage][self.actor_of(stage, r)], load_alone(replica).num_microbatches * chunks)
                for r, replica in enumerate(spec.replicas)
            ]
            for stage, spec in enumerate(self.stages)
        ]

    @cached_property
    def actor_limits(self) -> list[list[int]]:
        """`in_flight` of each stage and actor."""
        if self.plan.holds_all:
            return [[load.num_microbatches for load in own] for own in self.loads]
        if self.plan.schedule == "interleaved":
            held = {order: most_held(order) for actors in self.interleaved for order in dict.fromkeys(actors)}
            return [[held[order] for order in actors] for actors in self.interleaved]
        return even_limits(self.plan) if is_even(self.plan) else in_flight_limits(self.plan)

    @cached_property
    def deferred_wgrad(self) -> list[list[int]]:
        """For each stage and actor, of how many microbatches zero_bubble puts off the weights' gradients: as many as make the
        stage's samples under way equal to those of the fullest stage.

        Later stages hold fewer microbatches, so they have that much room, and their backwards come the sooner to those
        before (arXiv 2401.10241, its schedule H1). A replica takes its share of the stage's samples.
        """
        under_way = [
            sum(limit * load.largest for limit, load in zip(limits, loads, strict=True))
            for limits, loads in zip(self.actor_limits, self.loads, strict=True)
        ]
        batch, fullest = self.plan.global_batch, max(under_way)
        return [
            [(fullest - held) * load.samples // (batch * load.largest) for load in loads]
            for held, loads in zip(under_way, self.loads, strict=True)
        ]

    @cached_property
    def interleaved(self) -> list[list[ActorOrder]]:
        """The order of each stage and actor under schedule interleaved."""
        return interleave_regular(self.plan) if is_regular(self.plan) else interleave(self.plan, self.actors)

    def chunks(self, stage: int) -> tuple[Range, ...]:
        """The layers that each of a stage's chunks runs: its chunks, or under `layered` its layers one by one."""
        chunks = self.plan.stages[stage].chunks
        if self.plan.schedule != "layered":
            return chunks
        return tuple(Range(layer, layer + 1) for chunk in chunks for layer in range(*chunk))

    @cached_property
    def model_chunks(self) -> tuple[ModelChunk, ...]:
        """All chunks of all stages in the order in which a sample passes them."""
        found = [
            ModelChunk(stage, chunk, layers)
            for stage in range(self.num_stages)
            for chunk, layers in enumerate(self.chunks(stage))
        ]
        return tuple(sorted(found, key=lambda chunk: chunk.layers))

    def chunk_beside(self, stage: int, chunk: int, direction: Literal[-1, 1]) -> ModelChunk | None:
        """The model chunk that samples pass before (-1) or after (1) a chunk of a stage; None at the model's ends."""
        index = self._chunk_index[stage, chunk] + direction
        return self.model_chunks[index] if 0 <= index < len(self.model_chunks) else None

    @cached_property
    def _chunk_index(self) -> dict[tuple[int, int], int]:
        return {(chunk.stage, chunk.chunk): index for index, chunk in enumerate(self.model_chunks)}

    @cached_property
    def boundaries(self) -> tuple[Boundary, ...]:
        """The places where samples pass from one stage to another (back to the first one too, between chunks)."""
        found: list[Boundary] = []
        first_tag = 0
        for source, target in pairwise(self.model_chunks):
            if source.stage != target.stage:
                handed = transfers(self.microbatches[source.stage], self.microbatches[target.stage], first_tag)
                found.append(Boundary(source, target, tuple(handed)))
                first_tag += len(handed)
        return tuple(found)

    @property
    def transfers(self) -> tuple[tuple[Transfer, ...], ...]:
        """What crosses each boundary forward. Tags are unique over all boundaries."""
        return tuple(boundary.transfers for boundary in self.boundaries)

    def leader(self, microbatch: MicrobatchRange) -> int:
        """The rank that sends and receives for a microbatch; turns go round the replica, so its links share the
        load."""
        ranks = self.replica(microbatch.stage, microbatch.replica).ranks
        return ranks[microbatch.index % len(ranks)]

    def shares(self, stage: int, replica: int) -> list[RankShares]:
        """What each rank of a replica holds of heads, columns and vocabulary."""
        return rank_shares(self.model, self.replica(stage, replica), f"stages[{stage}].replicas[{replica}]")

    def islands_of(self, ranks: tuple[int, ...]) -> set[str]:
        """The islands that some ranks lie in."""
        return {self.cluster.places[rank].island for rank in ranks}

    @property
    def head_is_apart(self) -> bool:
        """Whether a tied head lives on another stage than the embedding that owns its weight."""
        return self.model.tied_head and self.num_stages > 1


def bind(plan: PlanSpec, model: ModelSpec, cluster: ClusterSpec) -> Layout:
    """The plan on this model and cluster. Raises BadInput naming the first rule it breaks and what to change."""
    _check_names(plan, model, cluster)
    if plan.num_layers != model.layers:
        raise BadInput(
            f"the plan's stages hold layers [0, {plan.num_layers}), but model '{model.name}' has {model.layers}; "
            f"let the last stage stop at layer {model.layers}."
        )
    if plan.num_ranks != cluster.size:
        raise BadInput(
            f"the plan places {plan.num_ranks} ranks, but cluster '{cluster.name}' has {cluster.size} accelerators; plan again "
            "for this cluster, or name the cluster the plan was made for."
        )
    if plan.seq_len > model.max_seq_len:
        raise BadInput(
            f"the plan's seq_len {plan.seq_len} exceeds the {model.max_seq_len} tokens that model '{model.name}' takes; shorten it."
        )
    layout = Layout(plan, model, cluster)
    _check_precision(layout)
    _check_islands(layout)
    _check_schedule(layout)
    _check_shares(layout)
    _ = layout.in_flight
    return layout


def _check_shares(layout: Layout) -> None:
    """Check the first replica of each shape. The others cut tensors alike."""
    seen: set[object] = set()
    for stage, spec in enumerate(layout.stages):
        for replica, one in enumerate(spec.replicas):
            shape = (len(one.ranks), one.tensor_shares)
            if shape not in seen:
                seen.add(shape)
                layout.shares(stage, replica)


def _check_names(plan: PlanSpec, model: ModelSpec, cluster: ClusterSpec) -> None:
    for kind, wanted, given in (("model", plan.model, model.name), ("cluster", plan.cluster, cluster.name)):
        if wanted != given:
            raise BadInput(
                f"the plan was made for {kind} '{wanted}', but the job has {kind} '{given}'; plan again (`hethub plan`), or "
                f"set the plan's `{kind}` to '{given}' if it is meant for it."
            )


def _check_precision(layout: Layout) -> None:
    for place in (layout.cluster.places[rank] for rank in layout.plan.ranks):
        if not place.accelerator.peak_flops(layout.plan.precision):
            others: list[Precision] = ["fp16", "bf16", "fp32"]
            choice = " or ".join(other for other in others if place.accelerator.peak_flops(other))
            raise BadInput(
                f"precision {layout.plan.precision}: accelerator {place.accelerator.name} (rank {place.rank}, node "
                f"'{place.node.name}') does not compute in it; choose {choice}, leave that node out, or list its ranks in "
                "the plan's `unused`."
            )


def _check_islands(layout: Layout) -> None:
    for index, stage in enumerate(layout.stages):
        for position, replica in enumerate(stage.replicas):
            if len(vendors := layout.islands_of(replica.ranks)) > 1:
                raise BadInput(
                    f"stages[{index}].replicas[{position}]: ranks {list(replica.ranks)} are a tensor-parallel group over islands "
                    f"{' and '.join(sorted(vendors))}; a replica lies inside one island. Give each island a replica of its own."
                )
        if stage.zero == 0 and len(stage.replicas) > 1 and len(layout.islands_of(stage.ranks)) > 1:
            raise BadInput(
                f"stages[{index}]: zero: 0 with replicas on islands {' and '.join(sorted(layout.islands_of(stage.ranks)))} would let "
                "unlike kernels drift apart in the last bits; set zero: 1, so that every byte is stepped at one owner."
            )


def _check_schedule(layout: Layout) -> None:
    name = layout.plan.schedule
    for index, stage in enumerate(layout.stages):
        if layout.plan.holds_all and any(replica.in_flight for replica in stage.replicas):
            raise BadInput(
                f"stages[{index}]: schedule {name} holds all microbatches at once, so in_flight has no meaning; remove it or choose 1f1b."
            )
        if not SCHEDULES[name].allows(stage.recompute):
            raise BadInput(
                f"stages[{index}]: schedule {name} puts weight gradients off, for which a microbatch keeps what its layers computed; "
                "recompute: full has thrown that away. Set recompute to none or selective, or choose 1f1b."
            )
