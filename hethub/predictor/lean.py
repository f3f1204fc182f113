"""Layouts whose replicas repeat, with one replica of each sort and few of its tiles: what a replay of them tells of all.

Where all stages tile the samples alike, a replica talks only to its own kind of chain, and once every chain is in its
steady state, the rest of the tiles adds the same time each.
"""

from functools import cached_property
from typing import Any, NamedTuple

from hethub.predictor.costs import PlanCosts, TileCost
from hethub.predictor.state_costs import Portion
from hethub.spec.layout import Layout


class LeanLayout(Layout):
    """Some replicas of another layout, each with `num_tiles` tiles, held as many at a time as there."""

    held: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(layout: Layout, replicas: tuple[int, ...], num_tiles: int | None) -> "LeanLayout":
        """The layout of `replicas`, with all their tiles where `num_tiles` is None."""
        plan = layout.plan.of_replicas(replicas, num_tiles)
        lean = LeanLayout(plan, layout.model, layout.cluster)
        held = tuple(
            tuple(layout.lane_limits[stage][layout.lane_of(stage, r)] for r in replicas)
            for stage in range(layout.num_stages)
        )
        object.__setattr__(lean, "held", held)
        return lean

    @cached_property
    def lane_limits(self) -> list[list[int]]:
        if self.plan.schedule not in ("1f1b", "zero_bubble"):
            return super().lane_limits
        return [
            [min(held, load.num_tiles) for held, load in zip(own, loads, strict=False)]
            for own, loads in zip(self.held, self.loads, strict=True)
        ]


class LeanCosts(NamedTuple):
    """Costs of a lean layout's replicas: those of the replicas they stand for."""

    costs: PlanCosts
    replicas: tuple[int, ...]

    @property
    def state(self) -> Any:
        return self.costs.state

    def tile(self, stage: int, replica: int, samples: int, portion: Portion | None = None) -> TileCost:
        return self.costs.tile(stage, self.replicas[replica], samples, portion)

    def boundary(self, stage: int, source: int, target: int, samples: int, below: int | None = None) -> float:
        return self.costs.boundary(stage, self.replicas[source], self.replicas[target], samples, below)

    def optimizer(self, stage: int, replica: int, portion: Portion | None = None) -> float:
        return self.costs.optimizer(stage, self.replicas[replica], portion)


class Extent(NamedTuple):
    """How many tiles are replayed, and again with `period` more, which is what each of `repeats` periods adds."""

    num_tiles: int | None  # None: all
    period: int
    repeats: int


def extent(layout: Layout, replicas: tuple[int, ...]) -> Extent:
    """How much of alike chains must be replayed to know the rest.

    Circuits through k stages repeat within k tiles, interleaved groups are as large as the pipeline; only waits that
    take longer to settle than the warm-up are approximated.
    """
    counts = {-(-layout.replica(0, r).samples // layout.replica(0, r).micro_batch) for r in replicas}
    stages, num_tiles = layout.num_stages, max(counts)
    in_turn = layout.plan.schedule in ("interleaved", "zero_bubble", "1f1b")
    period = (4 * stages if stages <= 6 else stages) if in_turn else 2
    held = max(layout.in_flight[stage][r] for stage in range(stages) for r in replicas)
    warm = 2 * stages + (2 * min(held, stages if stages > 6 else 2 * stages) if in_turn else 2)
    if not in_turn and any(stage.zero >= 2 or stage.offload for stage in layout.stages):
        warm += 32  # what goes on beside a pass takes as long whatever its tiles, and few of them do not hide it
    if layout.plan.schedule == "interleaved":
        warm += stages * (num_tiles % stages)  # what is left over makes so many groups larger
    if len(counts) > 1 or num_tiles <= warm + 2 * period:
        return Extent(None, 0, 0)
    base = warm + (num_tiles - warm) % period
    return Extent(base, period, (num_tiles - base) // period)
