"""Folded layouts: what a replay of one replica of each sort and of few microbatches says about a whole layout.

If all stages divide the samples alike, a replica talks only to its own chain. Once all chains are in their steady state,
each further microbatch adds the same time. Otherwise replicas may form groups that only talk among themselves; if these
are copies of each other, one stands for all.
"""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

from hethub.predictor.pipeline.costs import PlanCosts
from hethub.predictor.pipeline.overlap import MicrobatchCost, Round
from hethub.predictor.pipeline.state.costs import Portion
from hethub.predictor.pipeline.traffic.link_loads import Paces
from hethub.predictor.pipeline.traffic.routes import Group
from hethub.spec.layout.bind import Layout

TOLD = 1e-3  # of a step, beyond which stages that begin apart are all replayed


class FoldedLayout(Layout):
    """Some replicas of a layout's stages, each with `num_microbatches` microbatches. They hold and put off as many at a time
    as in the whole layout."""

    whole: Layout
    group: Group

    @staticmethod
    def of(layout: Layout, group: Group, num_microbatches: int | None) -> "FoldedLayout":
        """Return the folded layout of a group. It has all microbatches if `num_microbatches` is None."""
        plan = layout.plan.of_replicas(group, num_microbatches)
        folded = FoldedLayout(plan, layout.model, layout.cluster)
        object.__setattr__(folded, "whole", layout)
        object.__setattr__(folded, "group", group)
        return folded

    def _as_there(self, figures: list[list[int]]) -> list[list[int]]:
        """Return by stage and replica what the whole layout has by stage and actor."""
        actor_of = self.whole.actor_of
        return [[figures[stage][actor_of(stage, r)] for r in own] for stage, own in enumerate(self.group)]

    @cached_property
    def deferred_wgrad(self) -> list[list[int]]:
        return self._as_there(self.whole.deferred_wgrad)

    @cached_property
    def actor_limits(self) -> list[list[int]]:
        if self.plan.holds_all or self.plan.schedule == "interleaved":
            return super().actor_limits
        return [
            [min(held, load.num_microbatches) for held, load in zip(own, loads, strict=False)]
            for own, loads in zip(self._as_there(self.whole.actor_limits), self.loads, strict=True)
        ]


class FoldedCosts(NamedTuple):
    """The costs of a folded layout's replicas, which are those of the replicas they stand for."""

    costs: PlanCosts
    group: Group

    @property
    def state(self) -> Any:
        return self.costs.state

    def replica_key(self, stage: int, replica: int) -> tuple[object, ...]:
        return self.costs.replica_key(stage, self.group[stage][replica])

    def microbatch(self, stage: int, replica: int, samples: int, portion: Portion | None = None) -> MicrobatchCost:
        return self.costs.microbatch(stage, self.group[stage][replica], samples, portion)

    def visits(self, stage: int, replica: int, samples: int, portion: Portion) -> Round:
        return self.costs.visits(stage, self.group[stage][replica], samples, portion)

    def boundary(self, stage: int, source: int, target: int, samples: int, below: int | None = None) -> float:
        target_stage = stage + 1 if below is None else below
        return self.costs.boundary(stage, self.group[stage][source], self.group[target_stage][target], samples, below)

    def paces(self, boundary: int, above: int, below: int) -> tuple[Paces, Paces]:
        stages = self.costs.routes.stages[boundary]
        return self.costs.paces(boundary, self.group[stages[0]][above], self.group[stages[1]][below])

    def optimizer(self, stage: int, replica: int, portion: Portion | None = None) -> float:
        return self.costs.optimizer(stage, self.group[stage][replica], portion)


def copies(layout: Layout, costs: PlanCosts) -> list[Group]:
    """Return the groups of replicas that only talk among themselves if all groups are copies of each other. Otherwise return
    all replicas as one group.

    The order in which microbatches are dealt to replicas stays the same if other replicas are left out. So a group alone
    runs as it does among others.
    """
    stages = range(layout.num_stages)
    tied = layout.plan.goes_chunk_by_chunk or layout.plan.num_chunks > 1 or any(map(costs.state.in_rounds, stages))
    if not tied and min(len(stage.replicas) for stage in layout.stages) > 1:
        groups, pairs = costs.routes.groups, costs.routes.pairs
        if len(groups) > 1 and len({_group_key(layout, costs, group, pairs) for group in groups}) == 1:
            return groups
    return [tuple(tuple(range(len(stage.replicas))) for stage in layout.stages)]


def _group_key(
    layout: Layout, costs: PlanCosts, group: Group, pairs: Sequence[Sequence[tuple[int, int, int]]]
) -> tuple[object, ...]:
    """Return what the times of a group depend on."""
    replicas = [(stage, replica) for stage, own in enumerate(group) for replica in own]
    specs = [layout.replica(*place) for place in replicas]
    loads = [
        (costs.replica_key(*place), spec.micro_batch, spec.samples) for place, spec in zip(replicas, specs, strict=True)
    ]
    held = [(layout.in_flight[stage][replica], costs.optimizer(stage, replica)) for stage, replica in replicas]
    levels = [
        costs.boundary_key(stage, above, below)
        for stage, own in enumerate(pairs)
        for above, below, _ in own
        if above in group[stage]
    ]
    return (*loads, *held, *levels)


class Extent(NamedTuple):
    """How much is replayed: `num_microbatches`, and then `period` more. The difference is what each of `repeats` periods
    adds."""

    num_microbatches: int | None  # None: all
    period: int
    repeats: int


def extent(layout: Layout, costs: PlanCosts) -> Extent:
    """Return how much of chains that are alike must be replayed to know the rest.

    Cycles through k stages repeat within k microbatches, and interleaved groups are as large as the pipeline. The result is
    exact unless waits settle later than the warm-up. All microbatches are replayed where stages begin a step at different
    times because of their updates, since stages of nearly the same pace may take any number of microbatches to make up
    for it.
    """
    if costs.state.steps_apart or _begin_apart(layout, costs):
        return Extent(None, 0, 0)
    replicas = costs.chains
    counts = {-(-layout.replica(0, r).samples // layout.replica(0, r).micro_batch) for r in replicas}
    stages, num_microbatches = layout.num_stages, max(counts)
    in_turn = not layout.plan.holds_all
    period = (4 * stages if stages <= 6 else stages) if in_turn else 2
    held = max(layout.in_flight[stage][r] for stage in range(stages) for r in replicas)
    warm = 2 * stages + (2 * min(held, stages if stages > 6 else 2 * stages) if in_turn else 2)
    if not in_turn:
        warm += max(_hiding(layout, costs, stage) for stage in range(stages))
    if layout.plan.schedule == "interleaved":
        warm += stages * (num_microbatches % stages)  # what is left over makes so many groups larger
    if len(counts) > 1 or num_microbatches <= warm + 2 * period:
        return Extent(None, 0, 0)
    base = warm + (num_microbatches - warm) % period
    return Extent(base, period, (num_microbatches - base) // period)


def _begin_apart(layout: Layout, costs: PlanCosts) -> bool:
    """Whether replicas begin a step at times so different, because of their updates, that the step depends on it."""
    places = [(stage, replica) for stage in range(layout.num_stages) for replica in costs.chains]
    updates = [costs.optimizer(*place) + costs.state.reduction(place[0]).gather_seconds for place in places]
    passes = [
        own.samples / own.micro_batch * sum(part.total for part in costs.microbatch(*place, own.micro_batch))
        for place in places
        for own in [layout.replica(*place)]
    ]
    return max(updates) - min(updates) > TOLD * max(passes)


def _hiding(layout: Layout, costs: PlanCosts, stage: int) -> int:
    """Return how many microbatches it takes to hide the transfers beside a chunk's passes, which take equally long for any
    number of them. With fewer, a further microbatch adds less to a step than its compute."""
    portions, state = costs.state.portions[stage], costs.state
    beside, passes = [0.0], []
    for portion in portions:
        own = portion if len(portions) > 1 else None
        moved = state.gather_seconds(stage, portion) if state.in_passes(stage) else []
        if state.in_passes(stage) and state.level(stage) >= 2:
            moved = moved + state.reduce_seconds(stage, portion)
        summed = state.reduction(stage, own).seconds if own else 0.0  # hidden by the chunk before it
        beside.append(sum(moved) + summed)
        for replica in costs.chains:
            found = costs.microbatch(stage, replica, layout.replica(stage, replica).micro_batch, own)
            passes += [found.forward.total, found.backward.total]
    return math.ceil(max(beside) / min(passes))
