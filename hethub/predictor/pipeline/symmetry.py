"""Layouts whose replicas repeat, with one replica of each sort and few of its microbatches: what a replay of them
tells of all.

Where all stages cut the samples alike, a replica talks only to its own kind of chain, and once every chain is in its
steady state, the rest of the microbatches adds the same time each. Elsewhere replicas may form groups that talk among
themselves alone; where these are copies of each other, one stands for all.
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
    """Some replicas of another layout's stages, each with `num_microbatches` microbatches, held and put off as many at a
    time as there."""

    whole: Layout
    group: Group

    @staticmethod
    def of(layout: Layout, group: Group, num_microbatches: int | None) -> "FoldedLayout":
        """The layout of a group, with all its microbatches where `num_microbatches` is None."""
        plan = layout.plan.of_replicas(group, num_microbatches)
        folded = FoldedLayout(plan, layout.model, layout.cluster)
        object.__setattr__(folded, "whole", layout)
        object.__setattr__(folded, "group", group)
        return folded

    def _as_there(self, figures: list[list[int]]) -> list[list[int]]:
        """By stage and replica, what the whole layout has by stage and actor."""
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
    """Costs of a folded layout's replicas: those of the replicas they stand for."""

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
    """The replicas in groups that talk among themselves alone, if all are copies of one; else all in one group.

    Microbatches are dealt in an order that leaving other replicas out does not change, so a group alone runs as among
    others.
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
    """What the times of a group depend on."""
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
    """How many microbatches are replayed, and again with `period` more, which is what each of `repeats` periods
    adds."""

    num_microbatches: int | None  # None: all
    period: int
    repeats: int


def extent(layout: Layout, costs: PlanCosts) -> Extent:
    """How much of alike chains must be replayed to know the rest.

    Critical cycles through k stages repeat within k microbatches, interleaved groups are as large as the pipeline; only
    waits that take longer to settle than the warm-up are approximated. Chunks stepped apart begin behind their updates, and
    stages of unlike updates one after the other; at nearly one pace they need any number of microbatches to make up for
    that: all are replayed.
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
    """Whether replicas begin a step, each behind its own update, so far apart that it tells in the step."""
    places = [(stage, replica) for stage in range(layout.num_stages) for replica in costs.chains]
    updates = [costs.optimizer(*place) + costs.state.reduction(place[0]).gather_seconds for place in places]
    passes = [
        own.samples / own.micro_batch * sum(part.total for part in costs.microbatch(*place, own.micro_batch))
        for place in places
        for own in [layout.replica(*place)]
    ]
    return max(updates) - min(updates) > TOLD * max(passes)


def _hiding(layout: Layout, costs: PlanCosts, stage: int) -> int:
    """How many microbatches hide what goes on beside a chunk's passes, which takes as long whatever their number: with
    fewer, each of them adds less to a step than its compute."""
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
