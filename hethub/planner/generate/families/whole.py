"""Whole plans of one-rank replicas, for families whose schedules, samples or offloading the search does not move
about."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from hethub.planner.candidate.candidate import Candidate, CandidateStage, ReplicaGroup, merged
from hethub.planner.candidate.materialize import stage_spec
from hethub.planner.estimate.costs import UnitCosts
from hethub.planner.estimate.memory_model import memory_model_of
from hethub.planner.estimate.memory_probes import probe_for
from hethub.planner.problem.problem import Problem, Unit
from hethub.predictor.cost.constants import is_cpu
from hethub.predictor.memory.ranks import RankMemory, all_fit, rank_memory
from hethub.spec.cluster import ClusterSpec, NodeSpec
from hethub.spec.layout.bind import Layout
from hethub.spec.plan import Offload, PlanSpec, Recompute, ScheduleName, StageSpec


class Worker(NamedTuple):
    """A rank that is a replica by itself, and its load."""

    device_type: int
    rank: int
    micro_batch: int
    samples: int

    @property
    def load(self) -> "Load":
        return Load(self.device_type, self.micro_batch, self.samples)


class Load(NamedTuple):
    """What a worker's memory depends on."""

    device_type: int
    micro_batch: int
    samples: int


class Held(NamedTuple):
    """Bytes of a rank without its part of the state that ranks share, and what of them the framework takes."""

    alone: float
    framework: int


class WholeStage(NamedTuple):
    """A stage of one-rank replicas, its layers as chunks."""

    chunks: tuple[tuple[int, int], ...]
    workers: Sequence[Worker]
    zero: int
    recompute: Recompute
    offload: tuple[Offload, ...] = ()
    state_shares: Mapping[int, float] = {}


def ranks_by_device_type(problem: Problem) -> list[tuple[int, int]]:
    """(device type, rank) of every accelerator, by rank."""
    return sorted(
        ((k, rank) for k, device_type in enumerate(problem.device_types) for rank in device_type.ranks),
        key=lambda own: own[1],
    )


def plan_of(problem: Problem, schedule: ScheduleName, stages: Sequence[WholeStage]) -> PlanSpec:
    """The plan of these stages."""
    return problem.plan(schedule, (_stage(problem, stage) for stage in stages))


def _stage(problem: Problem, stage: WholeStage) -> StageSpec:
    replicas = [(Unit(own.device_type, (own.rank,)), own.micro_batch, own.samples) for own in stage.workers]
    return stage_spec(problem, stage.chunks, replicas, stage.zero, stage.recompute, stage.offload, stage.state_shares)


def candidate_of(problem: Problem, name: str, schedule: ScheduleName, stages: Sequence[WholeStage]) -> Candidate:
    """The plan as a candidate that is evaluated as it stands."""
    formed = tuple(
        CandidateStage(
            sum(stop - start for start, stop in stage.chunks),
            merged([ReplicaGroup(own.device_type, 1, own.micro_batch, 1) for own in stage.workers]),
            stage.recompute,
            stage.zero,
        )
        for stage in stages
    )
    return Candidate(formed, name=name, plan=plan_of(problem, schedule, stages))


def memory_of(problem: Problem, plan: PlanSpec) -> list[RankMemory]:
    """What the plan's ranks hold."""
    return rank_memory(Layout(plan, problem.model, problem.cluster))


def fits(problem: Problem, plan: PlanSpec) -> bool:
    """Whether the plan's ranks fit, and what they offload into their hosts' memory."""
    layout = Layout(plan, problem.model, problem.cluster)
    return all_fit(layout, rank_memory(layout), problem.constraints.reserve)


def shared_bytes(problem: Problem, zero: int) -> float:
    """Bytes of state that the ranks of an only stage share at a ZeRO level: the sum of all their parts."""
    on_cpu = is_cpu(problem.device_types[0].accelerator)
    return memory_model_of(problem).state(on_cpu, problem.model.layers, zero)


def held_alone(problem: Problem, schedule: ScheduleName, stage: WholeStage) -> dict[Load, Held]:
    """What workers of an only stage hold beside their part of the state, by load: read off a plan of one of every sort.

    Exact, since nothing but the parts of the state depends on how many ranks there are.
    """
    sorts = {own.load: own for own in stage.workers}
    few = list(sorts.values()) * (2 if len(sorts) == 1 else 1)
    nodes = tuple(
        NodeSpec(
            name=f"probe-{i}", accelerator=probe_for(problem.device_types[own.device_type].accelerator), accelerators=1
        )
        for i, own in enumerate(few)
    )
    cluster = ClusterSpec(name="probe", emulated=True, nodes=nodes)
    batch = problem.batch._replace(global_batch=sum(own.samples for own in few))
    asked = replace(problem, cluster=cluster, batch=batch)
    probed = stage._replace(workers=[own._replace(rank=rank) for rank, own in enumerate(few)], state_shares={})
    part = shared_bytes(problem, stage.zero) / len(few)
    used = memory_of(asked, plan_of(asked, schedule, [probed]))
    return {load: Held(one.bytes - part, one.parts["framework"]) for load, one in zip(sorts, used, strict=False)}


def meeting_seconds(problem: Problem, unit_costs: UnitCosts, zero: int) -> float:
    """Seconds of the collectives of a microbatch on all ranks at ZeRO-2 or 3: gathers for both passes, and sums. Layer
    by layer they take longer, and at uneven shares too."""
    model, group = problem.model, unit_costs.network.group(range(problem.size))
    gathered = 2 * unit_costs.width if zero == 3 else 0
    return unit_costs.network.reduce_scatter(group, model.parameters * (gathered + unit_costs.gradient_width))
