"""How many layers one device type can hold in stages of its own, for all ways to form the stages and for many goals at once.

A goal has two parts. The deadline is how many seconds a stage may compute and reduce its gradients. The microstep is how many
samples the replicas of a stage take together: if all stages come near it, none waits for larger microbatches of another.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hethub.planner.candidate.candidate import CandidateStage, ReplicaGroup
from hethub.planner.estimate.costs import rank_parameters
from hethub.planner.estimate.estimator import Estimator
from hethub.planner.estimate.memory_model import FIRST, LAST, MIDDLE, Coefficients
from hethub.planner.estimate.memory_probes import Mode
from hethub.planner.problem.problem import Problem
from hethub.predictor.cost.cache import memoized
from hethub.spec.plan import Recompute
from hethub.spec.ranges import split

MOST_STAGES = 16
EXPOSED = 0.5  # of a reduction: about what nothing hides
IN_FLIGHT = 1.3  # microbatches in flight for every stage behind: links take time too
_NONE = -1_000_000  # layers of a stage that cannot hold one

Ends = tuple[bool, bool]  # whether one of the stages is the model's first, and one its last


class Goals(NamedTuple):
    """Goals as arrays: the deadlines in seconds [goal], the indices of their microsteps [goal], and the microsteps in samples
    [microstep]."""

    seconds: np.ndarray
    microstep: np.ndarray
    microsteps: np.ndarray


class StageLayout(NamedTuple):
    """One way in which a device type's units form a number of stages."""

    tp: int
    widths: tuple[int, ...]  # replicas of each stage, the wider ones first
    recompute: Recompute

    @property
    def num_narrow(self) -> int:
        """The number of stages that have one replica fewer than the others."""
        return len(self.widths) - self.widths.count(self.widths[0])


class StageLayouts(NamedTuple):
    """All ways in which a device type forms a given number of stages. [microstep, layout]: `sizes` are micro-batches, `through`
    the seconds of one microbatch through a layer. [goal, layout, wide or narrow, stages behind]: `middle`, `first` and
    `last` are the most layers that such a stage of the pipeline holds."""

    layouts: Sequence[StageLayout]
    sizes: np.ndarray
    through: np.ndarray
    middle: np.ndarray
    first: np.ndarray
    last: np.ndarray


class Table(NamedTuple):
    """The fewest seconds of a microbatch through a number of layers, and the layout that reaches them: both [goal, stages
    behind, layers]."""

    seconds: np.ndarray
    layout: np.ndarray


class DeviceTypeLayouts:
    """All stage layouts of one device type."""

    def __init__(self, problem: Problem, costs: Estimator, device_type: int, goals: Goals) -> None:
        self.problem, self.costs, self.device_type, self.goals = problem, costs, device_type, goals
        self.depth = min(MOST_STAGES, problem.model.layers)

    @cached_property
    def layouts(self) -> dict[int, StageLayouts]:
        """The layouts by number of stages."""
        problem, given = self.problem, self.problem.constraints
        found: dict[int, list[StageLayout]] = {}
        for tp in problem.degrees_of(self.device_type):
            units = problem.units(self.device_type, tp)
            if any(unit.tp != tp for unit in units):
                continue
            for stages in range(1, min(len(units), self.depth) + 1):
                widths = tuple(part.size for part in split(len(units), stages))
                if widths[0] <= problem.batch.global_batch and (given.dp is None or set(widths) == {given.dp}):
                    found.setdefault(stages, []).extend(StageLayout(tp, widths, mode) for mode in problem.recomputes)
        return {stages: self._figures(own) for stages, own in found.items()}

    @cached_property
    def most(self) -> int:
        """The most layers that the device type holds under any goal. It ignores embedding and head, which take some room."""
        return max(int(self._held_between(stages).max()) for stages in self.layouts)

    def stages(self, number: int, ends: Ends, goal: int, behind: int, layers: int) -> list[CandidateStage]:
        """Return stages with `layers` layers through which a microbatch passes soonest. The layers are divided so that the
        busiest stage is as little busy as possible."""
        own, table = self.layouts[number], self.table(number, ends)
        assert table is not None  # asked for what the table holds
        index = int(table.layout[goal, behind, layers])
        layout, size = own.layouts[index], int(own.sizes[self.goals.microstep[goal], index])
        most = [
            own.middle[goal, index, int(width < layout.widths[0]), behind + number - 1 - i]
            for i, width in enumerate(layout.widths)
        ]
        if ends[0]:
            most[0] = own.first[goal, index, 0, behind + number - 1]
        if ends[1]:
            most[-1] = own.last[goal, index, int(layout.num_narrow > 0), 0]
        return [
            CandidateStage(
                x, (ReplicaGroup(self.device_type, layout.tp, size, width),), layout.recompute, self.problem.usual_zero
            )
            for x, width in zip(_dealt(layers, most, layout.widths), layout.widths, strict=True)
        ]

    @memoized
    def table(self, stages: int, ends: Ends) -> Table | None:
        """Return the table for a number of stages, or None where no layout has room for a layer in each stage."""
        own, held = self.layouts[stages], self._held(stages, ends)
        most = min(int(held.max()), self.problem.model.layers)
        if most < stages:
            return None
        soonest = np.argsort(own.through, axis=1, kind="stable")[self.goals.microstep]
        held = np.maximum.accumulate(np.take_along_axis(held, soonest[:, :, None], axis=1), axis=1)
        layers = np.arange(most + 1)
        place = (held[..., None] < layers).sum(axis=1)  # [goal, stages behind, layers]: of the soonest that holds them
        able = (place < len(own.layouts)) & (layers >= stages)
        goal = np.arange(len(soonest))[:, None, None]
        layout = soonest[goal, np.minimum(place, len(own.layouts) - 1)]
        return Table(np.where(able, own.through[self.goals.microstep[goal], layout] * layers, np.inf), layout)

    def _held(self, stages: int, ends: Ends) -> np.ndarray:
        """Return the most layers of all stages together [goal, layout, stages behind], negative where a stage has room for
        none. No stages are behind the model's last one."""
        own, held = self.layouts[stages], self._held_between(stages)
        if ends[0]:
            held = held + (own.first - own.middle)[:, :, 0, stages - 1 :]
        if ends[1]:
            layout, narrow = np.arange(len(own.layouts)), [int(layout.num_narrow > 0) for layout in own.layouts]
            held = held[:, :, :1] + (own.last - own.middle)[:, layout, narrow, :1]
        return held

    def _held_between(self, stages: int) -> np.ndarray:
        """Return the same for stages among which are neither the model's first nor its last."""
        own, behind = self.layouts[stages], np.arange(self.depth - stages + 1)
        layout, narrow = np.arange(len(own.layouts))[:, None], np.array([[own.num_narrow] for own in own.layouts])
        sums = np.zeros((*own.middle.shape[:3], self.depth + 1), dtype=np.int64)
        np.cumsum(own.middle, axis=3, out=sums[..., 1:])
        held = sums[:, layout, 1, behind + narrow] - sums[:, :, 1, behind]
        return held + sums[:, :, 0, behind + stages] - sums[:, layout, 0, behind + narrow]

    def _figures(self, layouts: list[StageLayout]) -> StageLayouts:
        unit_costs, sizes = self.costs.unit_costs, self._sizes(layouts)

        def rate(layout: StageLayout, size: int) -> list[float]:
            return [part.total for part in unit_costs.rate(self.device_type, layout.tp, size, layout.recompute)]

        def memory(layout: StageLayout, size: int) -> Coefficients:
            mode = Mode(layout.recompute, self.problem.usual_zero)
            return unit_costs.coefficients(self.device_type, layout.tp, size, mode)

        rates, held = (  # [microstep, layout, layer, embedding or head] and [microstep, layout, coefficient, place]
            np.array([list(map(figures, layouts, own)) for own in sizes.tolist()]) for figures in (rate, memory)
        )
        most = [
            self._most_layers(layouts, sizes, rates / sizes[:, :, None], held[..., place], ends)
            for place, ends in ((MIDDLE, (False, False)), (FIRST, (True, False)), (LAST, (False, True)))
        ]
        return StageLayouts(layouts, sizes, rates[:, :, 0], *most)

    def _sizes(self, layouts: Sequence[StageLayout]) -> np.ndarray:
        """Return micro-batches [microstep, layout]: the one the job gives, or the largest that does not exceed the microstep."""
        problem, given = self.problem, self.problem.constraints.micro_batch
        largest = max(problem.at_most(self.device_type, size) for size in problem.micro_batches)
        return np.array(
            [
                [given or min(max(1, microstep // layout.widths[0]), largest) for layout in layouts]
                for microstep in self.goals.microsteps.tolist()
            ]
        )

    def _most_layers(
        self, layouts: Sequence[StageLayout], sizes: np.ndarray, per_sample: np.ndarray, memory: np.ndarray, ends: Ends
    ) -> np.ndarray:
        """Return the most layers that one stage holds within the deadline and its memory: [goal, layout, wide or narrow, stages
        behind]."""
        widths, microstep = (
            np.array([(layout.widths[0], layout.widths[-1]) for layout in layouts]),
            self.goals.microstep,
        )
        once, each = self._reduction(layouts, widths, ends)
        share = -(-self.problem.batch.global_batch // widths)
        extra = once + share * (per_sample[:, :, 1] * ends[0] + per_sample[:, :, 2] * ends[1])[:, :, None]
        per_layer = each + share * per_sample[:, :, 0, None]
        in_time = (self.goals.seconds[:, None, None] - extra[microstep]) / per_layer[microstep]
        larger = np.maximum(1.0, self.goals.microsteps[:, None, None] / (sizes[:, :, None] * widths))[..., None]
        microbatches = np.ceil(
            (1 + IN_FLIGHT * np.arange(self.depth)) * larger
        )  # [microstep, layout, wide or narrow, stages behind]
        shards = widths[..., None] if self.problem.usual_zero > 0 else 1
        of_ranks = Coefficients(*memory.transpose(2, 0, 1)[..., None, None])
        in_memory = of_ranks.most_layers(microbatches, shards, self.problem.capacity(self.device_type))[microstep]
        found = np.floor(np.minimum(in_time[..., None], in_memory) + 1e-9)
        return np.where(found >= 1, found, _NONE).astype(np.int64)

    def _reduction(
        self, layouts: Sequence[StageLayout], widths: np.ndarray, ends: Ends
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the seconds for which a stage waits for its gradients' reduction, and how many more for each layer: both
        [layout, wide or narrow]."""
        met = [
            [
                self.costs.times.collective((ReplicaGroup(self.device_type, layout.tp, 1, width),))
                if width > 1
                else (0.0, 0.0)
                for width in own
            ]
            for layout, own in zip(layouts, widths.tolist(), strict=True)
        ]
        latency, per_byte = np.array(met).transpose(2, 0, 1)
        tp, ones = np.array([layout.tp for layout in layouts]), np.ones(len(layouts))
        first, last = (np.full(len(layouts), end) for end in ends)
        one, two = (rank_parameters(self.problem.model, tp, x * ones, first, last)[:, None] for x in (1, 2))
        passes = 1 if self.problem.usual_zero > 0 else 2
        per_parameter = EXPOSED * passes * per_byte * self.costs.unit_costs.gradient_width
        return EXPOSED * passes * latency + per_parameter * (2 * one - two), per_parameter * (two - one)


def _dealt(total: int, most: Sequence[int], widths: Sequence[int]) -> list[int]:
    """Return the layers of each stage, from one to its `most`, that sum to `total` and make the busiest as little busy as
    possible."""
    found = [1] * len(widths)
    for _ in range(total - len(widths)):
        able = [stage for stage, held in enumerate(found) if held < most[stage]]
        found[min(able, key=lambda stage: (found[stage] + 1) / widths[stage])] += 1
    return found
