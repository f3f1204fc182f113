"""Plans: stages, replicas, microbatches and shares. What a plan can know of itself is checked here, the rest in
layout/bind.py."""

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from math import ceil, floor
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import yaml
from pydantic import Field, model_validator

from hethub.spec.accelerator import Precision
from hethub.spec.base import Spec, load
from hethub.spec.cluster import ClusterSpec, NonNegative
from hethub.spec.documents import Dumper, dump_yaml, write_text
from hethub.spec.errors import BrokenRule
from hethub.spec.model import Count, ModelSpec
from hethub.spec.ranges import Range

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "ministages", "layered", "zero_bubble"]


class Schedule(NamedTuple):
    """What tells a schedule from others, for whoever plans, prices or runs it; its order is made in
    layout/execution.py."""

    takes_chunks: bool = False  # a stage may hold several chunks of layers
    holds_all: bool = False  # all microbatches go forward before the first goes back
    goes_chunk_by_chunk: bool = False  # all pass a chunk before the next, with collectives once per chunk and pass
    steps_chunk_by_chunk: bool = False  # each chunk is stepped behind its backward, before that of the chunk above
    defers_wgrad: bool = False  # gradients of weights are actions of their own, behind their backwards

    def allows(self, recompute: "Recompute") -> bool:
        """What is put off needs what layers have computed, which a full recompute has thrown away."""
        return not (self.defers_wgrad and recompute == "full")


SCHEDULES: dict[ScheduleName, Schedule] = {
    "gpipe": Schedule(holds_all=True),
    "1f1b": Schedule(),
    "interleaved": Schedule(takes_chunks=True),
    "ministages": Schedule(takes_chunks=True, holds_all=True, goes_chunk_by_chunk=True, steps_chunk_by_chunk=True),
    "layered": Schedule(holds_all=True, goes_chunk_by_chunk=True),
    "zero_bubble": Schedule(defers_wgrad=True),
}
Recompute = Literal["none", "selective", "full"]
Offload = Literal["activations", "parameters", "optimizer"]
Index = Annotated[int, Field(ge=0)]
Samples = Annotated[int, Field(ge=1, le=10_000_000)]  # of a step at most; more would be too many microbatches to plan


class ReplicaSpec(Spec):
    """The ranks that process one microbatch together (a tensor-parallel group) and the samples they get per step."""

    ranks: tuple[Index, ...] = Field(min_length=1)  # one, or several that cut every layer (tensor parallel)
    micro_batch: Samples  # samples processed at once
    samples: Samples  # of a step
    in_flight: Samples | None = None  # None: computed from the microbatches' overlaps
    tensor_shares: tuple[NonNegative, ...] | None = None  # None: equal

    @model_validator(mode="after")
    def _one_share_each(self) -> "ReplicaSpec":
        if self.tensor_shares is not None and len(self.tensor_shares) != len(self.ranks):
            raise ValueError(
                f"{len(self.tensor_shares)} tensor_shares for {len(self.ranks)} ranks; give one share per rank."
            )
        if self.tensor_shares is not None and not sum(self.tensor_shares):
            raise ValueError(
                f"tensor_shares {list(self.tensor_shares)} have no positive sum; give every rank a share of the whole."
            )
        return self

    @property
    def tp(self) -> int:
        return len(self.ranks)

    @property
    def uneven_shares(self) -> tuple[float, ...] | None:
        """`tensor_shares` as fractions of the whole; None where they are equal, as without any."""
        if self.tensor_shares is None or len({*self.tensor_shares}) == 1:
            return None
        whole = sum(self.tensor_shares)
        return tuple([share / whole for share in self.tensor_shares])


class StageSpec(Spec):
    """Consecutive layers (one or several chunks `[start, stop)`) and the replicas that hold them."""

    layers: tuple[tuple[Index, Index], ...] = Field(min_length=1)  # one or several chunks [start, stop)
    replicas: tuple[ReplicaSpec, ...] = Field(min_length=1)  # data parallel: each takes its samples through the stage
    # cut over the replicas: 1 optimizer state, 2 gradients too, 3 weights too
    zero: Annotated[int, Field(ge=0, le=3)] = 0
    # By rank, a fraction of the stage's state; what is left is equal.
    state_shares: dict[int, Annotated[float, Field(ge=0, le=1)]] = {}  # noqa: RUF012 (pydantic copies it)
    recompute: Recompute = "none"  # of activations in the backward
    offload: tuple[Offload, ...] = ()  # what lies in host memory

    @model_validator(mode="after")
    def _chunks_and_shares(self) -> "StageSpec":
        for start, stop in self.layers:
            if stop <= start:
                several = len(self.layers) > 1
                more = (
                    f" {len(self.layers)} chunks are more than this stage's layers fill: give fewer." if several else ""
                )
                raise ValueError(f"the chunk of layers [{start}, {stop}) holds none; stop must exceed start.{more}")
        if strangers := sorted(set(self.state_shares) - set(self.ranks)):
            raise ValueError(
                f"state_shares name rank {strangers[0]}, which is not in this stage (ranks {list(self.ranks)})."
            )
        if sum(self.state_shares.values()) > 1 + 1e-9:
            raise ValueError(_beyond_one(self.state_shares))
        if self.state_shares and self.zero == 0:
            raise ValueError("state_shares need zero: 1 or more; with zero: 0 every replica holds the whole state.")
        return self

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple([rank for replica in self.replicas for rank in replica.ranks])

    @cached_property
    def every_state_share(self) -> dict[int, float]:
        """Each rank's share of the stage's state: those without a name divide what is left."""
        named, unnamed = self.state_shares, len(self.ranks) - len(self.state_shares)
        rest = max(0.0, 1.0 - sum(named.values())) / max(1, unnamed)
        return {rank: named.get(rank, rest) for rank in self.ranks}

    @cached_property
    def chunks(self) -> tuple[Range, ...]:
        return tuple(Range(*chunk) for chunk in self.layers)

    @property
    def layers_text(self) -> str:
        """As tables and logs show them: `[0, 2), [4, 6)`."""
        return ", ".join([f"[{start}, {stop})" for start, stop in self.layers])

    @cached_property
    def cut_alike(self) -> bool:
        """Whether all replicas cut the layers alike: of one tensor-parallel degree and with the same shares."""
        return len(self.unlike_replicas) == 1

    @cached_property
    def unlike_replicas(self) -> tuple[ReplicaSpec, ...]:
        """One replica of each tensor-parallel degree and shares."""
        return tuple({(replica.tp, replica.uneven_shares): replica for replica in self.replicas}.values())

    @cached_property
    def num_layers(self) -> int:
        return sum([stop - start for start, stop in self.layers])


def _beyond_one(shares: dict[int, float]) -> str:
    """What to say of state shares with a sum above 1: the largest that the last rank which can make room may have."""
    total = sum(shares.values())
    most = {rank: share - (total - 1) for rank, share in shares.items() if share > total - 1}
    remedy = f"divide each by {ceil(total * 1e4) / 1e4:.10g}"  # rounded so that what is offered is accepted
    if most:
        rank = list(most)[-1]
        remedy = f"give rank {rank} at most {floor(most[rank] * 1e4 + 1e-6) / 1e4:g}"
    return f"state_shares sum to {total:g}, but they are fractions of one stage's state, together 1 at most; {remedy}."


class PlannedFor(Spec):
    """What a plan was made for, so that its file stands alone: the model, the cluster, the memory kept free, and whether what
    microbatches run is compiled."""

    model: ModelSpec
    cluster: ClusterSpec
    reserve: Annotated[float, Field(ge=0, lt=1)] = 0.06  # of an accelerator's memory
    compile: bool | None = None  # train.compile


class PlanSpec(Spec):
    """A plan file, one to one: all a run needs to know beside the job."""

    version: Literal[1] = 1  # of this format
    model: str  # the name in its model file
    cluster: str  # the name in its cluster file
    global_batch: Samples  # sequences of a step; a job beside the plan must say the same
    seq_len: Count  # tokens of a sequence, as the job
    precision: Precision  # of computing, as the job
    schedule: ScheduleName = "1f1b"  # the order of microbatches (docs/plans.md)
    stages: tuple[StageSpec, ...] = Field(min_length=1)  # the pipeline, first layers first
    unused: tuple[Index, ...] = ()  # ranks without a part of the model; they are started and answer
    job: PlannedFor | None = None  # what the plan was made for; a job given beside the plan counts instead

    @model_validator(mode="after")
    def _is_for_what_it_names(self) -> "PlanSpec":
        for key in ("model", "cluster"):
            name = getattr(self, key)
            described = name if self.job is None else getattr(self.job, key).name
            if described != name:
                raise BrokenRule(
                    f"the plan is for {key} '{name}', but job.{key} describes '{described}'; correct one, or take `job` out.",
                    key,
                )
        return self

    @model_validator(mode="after")
    def _every_layer_sample_and_rank_once(self) -> "PlanSpec":
        self._check_layers()
        self._check_samples()
        ranks = sorted([*self.ranks, *self.unused])
        if twice := [rank for rank, following in pairwise(ranks) if rank == following]:
            in_unused = min(2, self.unused.count(twice[0]))
            where = ("twice in replicas", "in a replica and in unused", "twice in unused")[in_unused]
            raise ValueError(f"rank {twice[0]} is {where}; every rank belongs to exactly one replica, or is unused.")
        if ranks != list(range(len(ranks))):
            missing = next(place for place, rank in enumerate(ranks) if rank != place)
            raise ValueError(
                f"rank {missing} has no place in the plan, though rank {ranks[-1]} does; ranks count from 0 without gaps: "
                f"give it to a replica, or set unused: [{missing}]."
            )
        return self

    def _check_layers(self) -> None:
        counts = {len(stage.layers) for stage in self.stages}
        if len(counts) > 1:
            raise BrokenRule(f"stages have {sorted(counts)} chunks of layers; all have equally many.", "stages")
        if self.num_chunks == 1 and self.schedule == "interleaved":
            raise BrokenRule(
                "schedule interleaved takes two or more chunks of layers per stage; got one. Choose 1f1b.", "schedule"
            )
        if self.num_chunks > 1 and not SCHEDULES[self.schedule].takes_chunks:
            able = " or ".join(name for name, own in SCHEDULES.items() if own.takes_chunks)
            raise BrokenRule(
                f"schedule {self.schedule} takes one chunk of layers per stage; got {self.num_chunks}. Several go with {able}.",
                "schedule",
            )
        position = 0
        for chunk in range(self.num_chunks):
            for index, stage in enumerate(self.stages):
                start, stop = stage.layers[chunk]
                if start != position:
                    fault = "are in no stage" if start > position else "are in two stages"
                    before = f"the one before stops at {position}" if position else "the model with layer 0"
                    raise BrokenRule(
                        f"layers [{min(start, position)}, {max(start, position)}) {fault}: stage {index} starts at "
                        f"layer {start}, {before}.",
                        *("stages", index, "layers", chunk),
                    )
                position = stop

    def _check_samples(self) -> None:
        for index, stage in enumerate(self.stages):
            total = sum(replica.samples for replica in stage.replicas)
            if total != self.global_batch:
                raise BrokenRule(
                    f"stage {index}: its replicas take {total} samples, but global_batch is {self.global_batch}; "
                    f"change a replica's samples by {self.global_batch - total:+d}.",
                    *("stages", index, "replicas"),
                )

    def of_replicas(self, replicas: Sequence[Sequence[int]], num_microbatches: int | None = None) -> "PlanSpec":
        """Those replicas of each stage, with `num_microbatches` microbatches each or all they have, unchecked: a plan
        to reason about, not to run."""
        stages = []
        for stage, own in zip(self.stages, replicas, strict=True):
            chosen = [stage.replicas[replica] for replica in own]
            if num_microbatches is not None:
                chosen = [replica.unchecked(samples=num_microbatches * replica.micro_batch) for replica in chosen]
            stages.append(stage.unchecked(replicas=tuple(chosen)))
        samples = sum(replica.samples for replica in stages[0].replicas)
        return self.unchecked(stages=tuple(stages), global_batch=samples)

    def runs_in_rounds(self, stage: int) -> bool:
        """Whether a stage's replicas go microbatch by microbatch together, as collectives of every microbatch make
        them."""
        spec = self.stages[stage]
        return spec.zero >= 2 and len(spec.replicas) > 1 and not self.passes_in_turn(stage)

    def passes_in_turn(self, stage: int) -> bool:
        """Whether several microbatches pass a chunk of the stage before the next one: its layers stay until the last is
        through."""
        return self.goes_chunk_by_chunk and any(own.samples > own.micro_batch for own in self.stages[stage].replicas)

    @property
    def holds_all(self) -> bool:
        return SCHEDULES[self.schedule].holds_all

    @property
    def goes_chunk_by_chunk(self) -> bool:
        return SCHEDULES[self.schedule].goes_chunk_by_chunk

    @property
    def steps_chunk_by_chunk(self) -> bool:
        return SCHEDULES[self.schedule].steps_chunk_by_chunk

    @property
    def defers_wgrad(self) -> bool:
        return SCHEDULES[self.schedule].defers_wgrad

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(rank for stage in self.stages for rank in stage.ranks)

    @property
    def num_ranks(self) -> int:
        """Ranks that a run of the plan starts, unused ones among them."""
        return len(self.ranks) + len(self.unused)

    @property
    def num_chunks(self) -> int:
        return len(self.stages[0].layers)

    @property
    def num_layers(self) -> int:
        return sum(stage.num_layers for stage in self.stages)


def load_plan(path: str | Path) -> PlanSpec:
    """The plan in a YAML file. Raises BadInput."""
    return load(PlanSpec, path, "plan file")


def save_plan(plan: PlanSpec, path: Path, job: PlannedFor | None = None) -> None:
    """Writes the plan so that `load_plan` gives it back and a person can edit it; with `job`, so that it stands
    alone."""
    write_text(plan_text(plan, job), path)


def plan_text(plan: PlanSpec, job: PlannedFor | None) -> str:
    """The plan as a plan file has it."""
    own = plan.model_dump(exclude_defaults=True, exclude={"job"})
    for stage in own["stages"]:
        stage["layers"], stage["replicas"] = _OneLine(stage["layers"]), list(map(_OneLine, stage["replicas"]))
    made_for = {} if job is None else {"job": job.model_dump(mode="json", exclude_unset=True, exclude_none=True)}
    return dump_yaml({"version": plan.version, **own, **made_for})


class _OneLine(NamedTuple):
    """What a person reads at a glance: 128 replicas are as many lines, and were four times as many."""

    data: Any


def _on_one_line(dumper: Dumper, line: _OneLine) -> yaml.Node:
    node: Any = dumper.represent_data(line.data)
    node.flow_style = True
    return node


Dumper.add_representer(_OneLine, _on_one_line)
