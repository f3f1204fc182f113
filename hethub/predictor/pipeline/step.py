"""Compute the time of a step from a layout's costs by replaying its actions, and say where the bottleneck's time went.

A step lasts from its first forward to the first forward of the next one. Ranks do not begin together: one with a shorter
update begins the next step earlier, by the difference.

Not every action has to be replayed. If all stages divide the samples alike, replicas form chains through the stages, and
one chain of each sort is replayed. Many microbatches are extrapolated from the steady state, under 1F1B by `closed_form`
and under other schedules from a folded layout with few microbatches. If stages divide the samples differently, replicas
may still form groups that are copies of each other, of which one is replayed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import sub
from typing import NamedTuple

from hethub.predictor.pipeline.closed_form import Chain, Ends, interleaved, pipeline
from hethub.predictor.pipeline.collectives import Collectives
from hethub.predictor.pipeline.costs import PlanCosts
from hethub.predictor.pipeline.replay import idle_times, replay
from hethub.predictor.pipeline.symmetry import FoldedCosts, copies, extent
from hethub.predictor.pipeline.task_graph import Compute
from hethub.predictor.pipeline.traffic.routes import Group
from hethub.predictor.pipeline.wiring import Place, Wiring, Wirings
from hethub.spec.layout.bind import Layout
from hethub.spec.layout.execution import COLLECTIVE, Action, schedule
from hethub.spec.schedule.in_flight import is_regular


class Timed(NamedTuple):
    """An action of a replica, and when it began and ended."""

    action: Action
    start_seconds: float
    stop_seconds: float


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """The seconds of a step, and into which parts they fall on the busiest replica, the bottleneck. The parts sum to
    `seconds`."""

    seconds: float
    breakdown: dict[str, float]
    bottleneck: Place
    timed: dict[Place, list[Timed]] | None = None  # every replica's actions, where all were replayed


def step_times(layout: Layout, costs: PlanCosts, full: bool = False, wirings: Wirings | None = None) -> StepTimes:
    """Return the times of a step. It is never shorter than any link needs for all its bytes.

    `full` replays every action, which a timeline needs. `wirings` are those of the layout; pass them if the layout is
    replayed under several costs, since they depend on none."""
    found = _step_times(wirings or Wirings(layout), costs, full)
    longest, messages, _ = costs.loads.longest
    if not longest > found.seconds:
        return found
    parts = {**found.breakdown, "bubble": 0.0}
    parts["pp" if 2 * messages > longest else "dp"] += longest - sum(parts.values())
    return StepTimes(seconds=longest, breakdown=parts, bottleneck=found.bottleneck, timed=found.timed)


def _step_times(wirings: Wirings, costs: PlanCosts, full: bool) -> StepTimes:
    layout = wirings.layout
    if full or (layout.plan.schedule == "interleaved" and not is_regular(layout.plan)):
        return _replayed_times(wirings.whole(full), costs, full)  # one list of all replicas, in which equal ones differ
    if not costs.microbatches_alike:
        groups = copies(layout, costs)
        if len(groups) > 1:
            return _folded_replay(wirings, costs, groups, None)
        return _replayed_times(wirings.whole(full), costs, full)
    if any(replica.samples % replica.micro_batch for replica in layout.stages[0].replicas):
        # The last microbatch is short, which no extrapolation knows.
        return _folded_replay(wirings, costs, _of_chains(layout, costs), None)
    if (
        layout.plan.schedule in ("1f1b", "gpipe")
        and costs.chains_apart
        and not (costs.is_paced and costs.software.interleave == 1)
    ):
        return _chain_times(layout, costs)
    return _folded_times(wirings, costs)


# -- some of equal actions
# ----------------------------------------------------------------------------------------------


def _folded_times(wirings: Wirings, costs: PlanCosts) -> StepTimes:
    """Replay one replica of each sort of chain, with few microbatches if these are enough to extrapolate from."""
    num_microbatches, period, repeats = extent(wirings.layout, costs)
    chains = _of_chains(wirings.layout, costs)
    first = _folded_replay(wirings, costs, chains, num_microbatches)
    if not repeats:
        return first
    assert num_microbatches is not None
    second = _folded_replay(wirings, costs, chains, num_microbatches + period)
    seconds = first.seconds + repeats * (second.seconds - first.seconds)
    parts = {key: one + repeats * (second.breakdown[key] - one) for key, one in first.breakdown.items()}
    parts["bubble"] = 0.0
    return StepTimes(seconds=seconds, breakdown=_breakdown(seconds, parts), bottleneck=second.bottleneck)


def _of_chains(layout: Layout, costs: PlanCosts) -> list[Group]:
    """Return one group: the first replica of each sort of chain."""
    return [(costs.chains,) * layout.num_stages]


def _folded_replay(
    wirings: Wirings, costs: PlanCosts, groups: Sequence[Group], num_microbatches: int | None
) -> StepTimes:
    """Replay the first group. The others are copies of it."""
    group = groups[0]
    times = _replayed_times(wirings.folded(group, num_microbatches), FoldedCosts(costs, group), False)
    stage, place = times.bottleneck
    replica = min(own[stage][place] for own in groups)
    return StepTimes(seconds=times.seconds, breakdown=times.breakdown, bottleneck=(stage, replica))


# -- every action
# -------------------------------------------------------------------------------------------------------


def _replayed_times(wiring: Wiring, costs: PlanCosts | FoldedCosts, full: bool) -> StepTimes:
    """Replay every action of every replica in the order in which the executor runs them."""
    compute = Compute(wiring, costs)
    collectives = Collectives(costs, compute)
    updates = collectives.update_seconds
    begins = updates if costs.state.steps_apart else _begins(updates)
    graph, ends = compute.graph, replay(compute.graph, begins)
    over = [ends[graph.orders[run.actor][-1]] for run in compute.runs.values()]
    seconds = max(over) if costs.state.steps_apart else min(over)
    bottleneck = max(compute.spent, key=lambda place: compute.spent[place].total)
    parts = compute.spent[bottleneck]._asdict() | {"pp": 0.0, "optimizer": collectives.optimizer_seconds[bottleneck]}
    run = compute.runs[bottleneck]
    parts["dp"] += collectives.gather_seconds[bottleneck]
    parts["dp"] += sum(
        graph.seconds[node] - sum(visit.compute for visit in own.visits)
        for node, own in graph.layered.items()
        if own.actor == run.actor
    )
    for _, idle, source, under_way in idle_times(graph, ends, run.actor, begins.get(run.actor, 0.0)):
        collective = collectives.under_way(source, ends)
        if collective is not None:
            parts["dp"] += min(idle, collective)
        else:
            sent = ends[compute.senders.get(source, source)]  # what waited for its flow was under way all the while
            parts["pp"] += min(idle, max(0.0, ends[source] + under_way - sent))
    timed = _timed(compute, ends) if full else None
    return StepTimes(seconds=seconds, breakdown=_breakdown(seconds, parts), bottleneck=bottleneck, timed=timed)


def _begins(update_seconds: dict[int, float]) -> dict[int, float]:
    """Return for each actor how much later than the first one it begins a step, because its update takes longer."""
    first = min(update_seconds.values())
    return {actor: seconds - first for actor, seconds in update_seconds.items()}


def _timed(compute: Compute, ends: list[float]) -> dict[Place, list[Timed]]:
    """Return when each replica's actions ran. A collective's wait is part of it, as in the trace of a run."""
    found: dict[Place, list[Timed]] = {}
    for place, acts in schedule(compute.layout).items():
        nodes, order = compute.wiring.orders[compute.runs[place].actor], compute.runs[place].order
        starts = list(map(sub, ends[nodes.start : nodes.stop], compute.graph.seconds[nodes.start : nodes.stop]))
        stops = [ends[compute.through.get(node, node)] for node in nodes]
        for (kind, _), position in order.updates.items():
            if kind in COLLECTIVE and position:
                starts[position] = stops[position - 1]
        found[place] = list(map(Timed._make, zip(acts, starts, stops, strict=True)))
    return found


def _breakdown(seconds: float, parts: dict[str, float]) -> dict[str, float]:
    """Return the parts in their usual order. The bubble, waits for other stages, is what the other parts leave."""
    parts["bubble"] = max(0.0, seconds - sum(parts.values()))
    return {key: parts[key] for key in ("compute", "bubble", "tp", "pp", "dp", "optimizer")}


# -- chains of equal microbatches
# ----------------------------------------------------------------------------------------------


def _chain_times(layout: Layout, costs: PlanCosts) -> StepTimes:
    """Compute one pipeline for each sort of chain. The chain's first replica stands for it."""
    reductions = [costs.state.reduction(stage) for stage in range(layout.num_stages)]
    places = [(stage, replica) for stage in range(layout.num_stages) for replica in costs.chains]
    optimizer = {place: costs.optimizer(*place) for place in places}
    updates = _updates(optimizer, [reduction.gather_seconds for reduction in reductions])
    first = min(updates.values())
    busy = {place: _busy(layout, costs, place) for place in _distinct(layout, costs)}
    bottleneck = max(busy, key=lambda place: sum(busy[place].values()))
    begins = {place: seconds - first for place, seconds in updates.items()}
    ends = _replay_chains(layout, costs, begins, bottleneck)
    reduce_end, ready = [], []
    for stage, reduction in enumerate(reductions):
        own = [found for (s, _), found in ends.items() if s == stage]
        ready.append(max(e.last_backward_end for e in own))
        window = max(e.last_backward_start for e in own)
        rest = min(costs.microbatch(stage, r, layout.replica(stage, r).micro_batch).rest.total for r in costs.chains)
        reduce_end.append(max(ready[stage] + reduction.tail_seconds + rest, window + reduction.seconds))
    # The gradient norm is global: nobody steps before every stage is reduced.
    seconds = max(reduce_end) + first
    parts, stage = busy[bottleneck], bottleneck[0]
    parts["pp"] = ends[bottleneck].transfer_wait_seconds
    parts["dp"] += reduce_end[stage] - ready[stage] + reductions[stage].gather_seconds
    parts["optimizer"] = optimizer[bottleneck]
    return StepTimes(seconds=seconds, breakdown=_breakdown(seconds, parts), bottleneck=bottleneck)


def _updates(optimizer: dict[Place, float], gathers: list[float]) -> dict[Place, float]:
    """Return for each place the seconds from the norm to its next step: its own update, or where weights are gathered, the
    slowest owner's update and the gather."""
    slowest = [max(t for (s, _), t in optimizer.items() if s == stage) for stage in range(len(gathers))]
    return {
        place: slowest[place[0]] + gathers[place[0]] if gathers[place[0]] else own for place, own in optimizer.items()
    }


def _replay_chains(layout: Layout, costs: PlanCosts, begins: dict[Place, float], watched: Place) -> dict[Place, Ends]:
    """Return the ends of the replicas of each sort of chain. Waits are counted only of the one that is `watched`."""
    ends: dict[Place, Ends] = {}
    for replica in costs.chains:
        spec = layout.replica(0, replica)
        num_microbatches, interleave = spec.samples // spec.micro_batch, costs.software.interleave
        own = tuple(begins[stage, replica] for stage in range(layout.num_stages))
        chain = _chain(layout, costs, replica)._replace(begins=own)
        stage = watched[0] if replica == watched[1] else None
        if interleave == 1:
            found = pipeline(chain, num_microbatches, stage)
        else:
            found = interleaved(chain, num_microbatches, interleave, stage)
        ends |= {(stage, replica): found[stage] for stage in range(layout.num_stages)}
    return ends


def _chain(layout: Layout, costs: PlanCosts, replica: int) -> Chain:
    stages, micro_batch = range(layout.num_stages), layout.replica(0, replica).micro_batch
    microbatches = [costs.microbatch(stage, replica, micro_batch) for stage in stages]
    across = tuple(costs.boundary(stage, replica, replica, micro_batch) for stage in stages[:-1])
    return Chain(
        forward=tuple(microbatch.forward.total for microbatch in microbatches),
        backward=tuple(microbatch.backward.total for microbatch in microbatches),
        down=across,
        up=across,
        in_flight=tuple(layout.in_flight[stage][replica] for stage in stages),
    )


def _distinct(layout: Layout, costs: PlanCosts) -> list[Place]:
    """Return one place for each sort of replica and load, since equal ones are equally busy."""
    seen: dict[object, Place] = {}
    for replica in costs.chains:
        for stage in range(layout.num_stages):
            spec = layout.replica(stage, replica)
            seen.setdefault((costs.replica_key(stage, replica), spec.micro_batch, spec.samples), (stage, replica))
    return list(seen.values())


def _busy(layout: Layout, costs: PlanCosts, place: Place) -> dict[str, float]:
    """Return the seconds that a replica spends on all its microbatches, by part."""
    spec = layout.replica(*place)
    microbatch, count = costs.microbatch(*place, spec.micro_batch), spec.samples // spec.micro_batch
    return {
        key: count * float(getattr(microbatch.forward, key) + getattr(microbatch.backward, key))
        for key in ("compute", "tp", "dp")
    }
