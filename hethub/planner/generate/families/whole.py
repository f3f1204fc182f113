"""Plans of a single stage of one-rank replicas, for families whose samples and shares of the state the search does not
move about."""

from dataclasses import replace
from typing import NamedTuple

from hethub.planner.candidate.candidate import Candidate, CandidateStage, ReplicaGroup, merged
from hethub.planner.candidate.materialize import Replica, StageChoice, plan_of
from hethub.planner.estimate.costs import UnitCosts
from hethub.planner.estimate.memory_model import memory_model_of
from hethub.planner.estimate.memory_probes import probe_for
from hethub.planner.problem.problem import Problem
from hethub.predictor.cost.constants import is_cpu
from hethub.predictor.memory.ranks import rank_memory
from hethub.spec.cluster import ClusterSpec, NodeSpec
from hethub.spec.layout.bind import Layout
from hethub.spec.plan import ScheduleName


class Held(NamedTuple):
    """Bytes of a rank without its part of the state that ranks share, and what of them the framework and the communicators
    take."""

    alone: float
    fixed: int


def is_allowed(problem: Problem) -> bool:
    """Whether the degrees given allow a single stage of one-rank replicas."""
    return problem.constraints.tp in (None, 1) and problem.allows([problem.size])


def candidate_of(problem: Problem, schedule: ScheduleName, stage: StageChoice) -> Candidate:
    """The plan as a candidate that is evaluated as it stands."""
    groups = merged([ReplicaGroup(own.unit.device_type, 1, own.micro_batch, 1) for own in stage.replicas])
    formed = CandidateStage(problem.model.layers, groups, stage.recompute, stage.zero)
    return Candidate((formed,), plan=plan_of(problem, schedule, [formed.layers], [stage]))


def shared_bytes(problem: Problem, zero: int) -> float:
    """Bytes of state that the ranks of an only stage share at a ZeRO level: the sum of all their parts."""
    on_cpu = is_cpu(problem.device_types[0].accelerator)
    return memory_model_of(problem).state(on_cpu, problem.model.layers, zero)


def held_alone(problem: Problem, schedule: ScheduleName, stage: StageChoice) -> list[Held]:
    """What the replicas of an only stage hold beside their part of the state: read off a plan of one of every sort.

    Exact, since nothing but the parts of the state depends on how many ranks there are.
    """
    sorts = {_sort(own): own for own in stage.replicas}
    few = list(sorts.values()) * 2  # one alone on its island would have no communicators
    devices = [probe_for(problem.device_types[own.unit.device_type].accelerator) for own in few]
    nodes = [NodeSpec(name=f"probe-{i}", accelerator=device, accelerators=1) for i, device in enumerate(devices)]
    cluster = ClusterSpec(name="probe", emulated=True, nodes=tuple(nodes))
    batch = problem.batch._replace(global_batch=sum(own.samples for own in few))
    asked = replace(problem, cluster=cluster, batch=batch)
    placed = [own._replace(unit=own.unit._replace(ranks=(rank,))) for rank, own in enumerate(few)]
    plan = plan_of(asked, schedule, [problem.model.layers], [stage._replace(replicas=placed, state_shares={})])
    part = shared_bytes(problem, stage.zero) / len(few)
    used = rank_memory(Layout(plan, problem.model, cluster))
    held = {
        sort: Held(one.bytes - part, one.parts["framework"] + one.parts["communicator"])
        for sort, one in zip(sorts, used, strict=False)
    }
    return [held[_sort(own)] for own in stage.replicas]


def _sort(own: Replica) -> tuple[int, int, int]:
    """What a replica's memory depends on."""
    return own.unit.device_type, own.micro_batch, own.samples


def meeting_seconds(problem: Problem, unit_costs: UnitCosts, zero: int) -> float:
    """Seconds of the collectives of a microbatch on all ranks at ZeRO-2 or 3: gathers for both passes, and sums. Layer
    by layer they take longer, and at uneven shares too."""
    model, group = problem.model, unit_costs.network.group(range(problem.size))
    gathered = 2 * unit_costs.width if zero == 3 else 0
    return unit_costs.network.reduce_scatter(group, model.parameters * (gathered + unit_costs.gradient_width))
