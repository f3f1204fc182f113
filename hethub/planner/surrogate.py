"""A step's seconds in closed form: ranks drafts before the predictor judges the best of them.

Per stage (`stage_times`): the exact busy time of its slowest replica, one tile's latency, the gradients' reduction. Over
stages: the slowest way from the first forward to the last backward through each stage under 1F1B, and the slowest
circuit that tiles in flight allow; for many drafts at once.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from hethub.planner.costs import UnitCosts
from hethub.planner.crossings import Crossings
from hethub.planner.draft import Draft, DraftStage, Seats, chains, merged
from hethub.planner.flights import default_flights, enough_flights, round_trips, slowest_circuit
from hethub.planner.footprint import position
from hethub.planner.problem import Problem
from hethub.planner.samples import earliest_finish, within
from hethub.planner.stage_times import NEARLY, StageEstimate, StageTimes
from hethub.spec.plan import ScheduleName


class Weighed(NamedTuple):
    """What is estimated of a draft: its step, tiles in flight per stage, whether they fit, the stage that works longest."""

    seconds: float
    holds: tuple[int, ...]
    fits: bool
    slowest: int


class Surrogate:
    """Estimates drafts; stages and drafts seen before cost nothing. Many drafts at once cost little more than one."""

    def __init__(self, problem: Problem, costs: UnitCosts) -> None:
        self.problem, self.costs = problem, costs
        self.times, self.crossings = StageTimes(problem, costs), Crossings(problem, costs)
        self._weighed: dict[Draft, Weighed] = {}
        self._rows: dict[object, int] = {}
        self._figures = np.zeros((0, len(StageEstimate._fields)))  # of every stage seen, by row

    def seconds(self, draft: Draft) -> float:
        """The estimated step; infinite where a stage has more replicas than samples, or where it mixes what it must not."""
        return self._of(draft).seconds

    def holds(self, draft: Draft) -> tuple[int, ...]:
        """Tiles in flight per stage: by depth, or for a roomy draft as many as its circuits need to run at the pace of
        the busiest stage, where they fit; never fewer than the stage below holds."""
        return self._of(draft).holds

    def likely_fits(self, draft: Draft) -> bool:
        """Whether every rank is within its memory by the closed form, or so near that only the judge can tell."""
        return self._of(draft).fits

    def slowest(self, draft: Draft) -> int:
        """The stage whose busiest replica works longest."""
        return self._of(draft).slowest

    def is_faster(self, draft: Draft, seconds: float) -> bool:
        """Whether the estimate is below `seconds` and the draft likely fits."""
        return self.least(draft) < seconds and self.seconds(draft) < seconds and self.likely_fits(draft)

    def least(self, draft: Draft) -> float:
        """Seconds that the draft's busiest replica computes at least, whatever the schedule: no prediction is shorter."""
        return max([self.times.busy(stage, place, draft.even) for stage, place in placed(draft)])

    def least_in_passes(self, draft: Draft) -> float:
        """The same where every replica gathers new weights and steps between its tiles, as under ministages."""
        rows = [self._row(stage, place, draft.even, "1f1b") for stage, place in placed(draft)]
        busy = [self.times.busy(stage, place, draft.even) for stage, place in placed(draft)]
        return float((np.array(busy) + StageEstimate(*self._figures[rows].T).finish).max())

    def samples(self, draft: Draft, index: int) -> list[int]:
        """About how many samples each of a stage's replicas takes, by seats."""
        place = position(index == 0, index == len(draft.stages) - 1)
        return self.times.samples(draft.stages[index], place, draft.even)

    def largest(self, stage: DraftStage, own: Seats, place: int, schedule: ScheduleName | None, held: int) -> int:
        """The largest micro-batch up to that of the seats with which their ranks have memory for so many tiles, by the
        closed form; 0 where one sample is too much."""
        return self.times.largest(stage, own, place, schedule or self.problem.schedule, held)

    def weigh(self, drafts: Iterable[Draft]) -> None:
        """Estimates all drafts at once, so that asking for each costs nothing."""
        new = [draft for draft in dict.fromkeys(drafts) if draft not in self._weighed]
        for _, alike in groupby(sorted(new, key=_depth), key=_depth):
            own = list(alike)
            self._weighed.update(zip(own, self._weigh(own), strict=True))

    def _of(self, draft: Draft) -> Weighed:
        if draft not in self._weighed:
            self.weigh([draft])
        return self._weighed[draft]

    def is_possible(self, draft: Draft) -> bool:
        """Whether every replica can have a sample and no stage mixes what it must not."""
        return max(draft.replica_counts) <= self.problem.batch.global_batch and not self.problem.forbids_any(
            draft.mixtures
        )

    def _weigh(self, drafts: Sequence[Draft]) -> list[Weighed]:
        """Drafts of equally many stages."""
        schedules = [self._schedule(draft) for draft in drafts]
        crossing = np.array([self.crossings.of(draft) for draft in drafts]).reshape(len(drafts), -1)
        stages = self._stages(drafts, schedules)
        filled = np.array([schedule == "zero_bubble" for schedule in schedules])
        own = _Together(drafts, stages, crossing, round_trips(stages.tile, stages.wave, crossing), filled)
        held, fits = self._held(own)
        seconds = self._seconds(own, held)
        seconds[[not self.is_possible(draft) for draft in drafts]] = np.inf
        holds, slowest = held.astype(int).tolist(), stages.busy.argmax(axis=1).tolist()
        whole = zip(seconds.tolist(), map(tuple, holds), fits.tolist(), slowest, strict=True)
        return [Weighed(*figures) for figures in whole]

    def _seconds(self, own: "_Together", held: np.ndarray) -> np.ndarray:
        """[draft]: the step, with so many tiles in flight."""
        stages, crossing, trips = own.stages, own.crossing, own.trips
        several = crossing.shape[1] > 0
        # Who has the shorter update begins the next step while others still step (predictor/step.py).
        first = stages.finish.min(axis=1)
        away = trips[:, :, -1] - stages.tile  # until a tile is back from all later stages
        slack = np.maximum(0.0, away - (held - 1) * stages.forward)
        gap = slack + np.maximum(0.0, away - (held - 1) * stages.backward)
        drain = np.zeros_like(away)
        np.cumsum(stages.backward[:, :-1] + crossing, axis=1, out=drain[:, 1:])
        fill = stages.finish - first[:, None]
        for s in range(1, fill.shape[1]):
            below = fill[:, s - 1] + stages.forward[:, s - 1] + crossing[:, s - 1]
            np.maximum(fill[:, s], below, out=fill[:, s])
        # Under zero_bubble, weights' gradients fill the drain.
        end = (fill + stages.busy + np.where(own.filled[:, None], slack, gap + drain)).max(axis=1)
        if several:
            around = slowest_circuit(trips, stages.wave, held, self.problem.batch.global_batch)
            end = np.maximum(end, stages.finish[:, 0] - first + around)
        reduce = np.maximum(stages.tail, stages.reduce - stages.backward)
        if several and self.problem.model.tied_head:
            reduce[:, [0, -1]] += np.array([self._tied(draft) for draft in own.drafts])[:, None]
        shown = np.maximum(0.0, (reduce - drain).max(axis=1))
        step: np.ndarray = end + shown + first
        return step

    def _schedule(self, draft: Draft) -> ScheduleName:
        return draft.schedule or self.problem.schedule

    def _stages(self, drafts: Sequence[Draft], schedules: Sequence[ScheduleName]) -> StageEstimate:
        """Every stage of every draft by itself, and where replica i of every stage gets the same samples, what waiting for
        the slowest of a chain adds."""
        rows = [
            [self._row(stage, place, draft.even, schedule) for stage, place in placed(draft)]
            for draft, schedule in zip(drafts, schedules, strict=True)
        ]
        figures = np.moveaxis(self._figures[np.array(rows)], -1, 0)
        stages = StageEstimate(*figures)
        self._wait_for_chains(drafts, stages)
        return stages

    def _row(self, stage: DraftStage, place: int, even: bool, schedule: ScheduleName) -> int:
        key = (stage.seats, stage.recompute, stage.zero, stage.state_shares == (), place, even, schedule)
        found = self._rows.get(key)
        if found is None:
            figures = np.stack(self.times.estimates(stage, place, even, schedule), axis=1)
            found = self._rows[key] = len(self._rows) * len(figures)
            if found + len(figures) > len(self._figures):
                self._figures = np.concatenate([self._figures, np.zeros((found + len(figures), figures.shape[1]))])
            self._figures[found : found + len(figures)] = figures
        return found + stage.layers

    def _wait_for_chains(self, drafts: Sequence[Draft], stages: StageEstimate) -> None:
        """Where replica i of every stage gets the same samples (`complete`), a chain goes at the pace of its slowest stage,
        and all others of it wait."""
        found = [_Chained(row, draft, chains(draft)) for row, draft in enumerate(drafts) if _is_chained(draft)]
        alike = sorted((own for own in found if own.has_one_size), key=_width)
        for _, own in groupby(alike, key=_width):
            self._pace(list(own), stages)

    def _pace(self, own: Sequence["_Chained"], stages: StageEstimate) -> None:
        """Writes into `stages` how long drafts of equally many chains take."""
        total = self.problem.batch.global_batch
        per_sample = np.array([self._along(one) for one in own])  # [draft, chain, stage]
        numbers = np.array([[count for count, _ in one.chains] for one in own])
        sizes = np.array([[sorts[0].micro_batch for _, sorts in one.chains] for one in own])
        slowest = per_sample.max(axis=2)
        taken = np.clip(within(earliest_finish(total, slowest, numbers), slowest), 1, total)
        busy, index = (taken[:, :, None] * per_sample).max(axis=1), [one.row for one in own]
        stages.busy[index] = np.maximum(stages.busy[index], busy)
        stages.tiles[index] = (taken / sizes).max(axis=1)[:, None]

    def _along(self, own: "_Chained") -> list[list[float]]:
        """[chain, stage]: seconds per sample."""
        on = placed(own.draft)
        return [
            [
                self.times.per_sample(stage, sort, place)[stage.layers]
                for (stage, place), sort in zip(on, sorts, strict=True)
            ]
            for _, sorts in own.chains
        ]

    def _held(self, own: "_Together") -> tuple[np.ndarray, np.ndarray]:
        """Tiles in flight [draft, stage], and whether they fit [draft]."""
        drafts, stages, filled = own.drafts, own.stages, own.filled
        held = default_flights(stages.wave)
        roomy = np.array([draft.roomy for draft in drafts]) & (held.shape[1] > 1)
        if roomy.any():
            plain, around = stages, own.trips
            if filled.any():
                # Where weights' gradients are put off, as many tiles as if they were not keep the gaps to be filled few.
                plain = self._stages(drafts, [self.problem.schedule] * len(drafts))
                around = round_trips(plain.tile, plain.wave, own.crossing)
            pace = self.problem.batch.global_batch / plain.busy.max(axis=1)
            enough = enough_flights(around, plain.wave, pace, stages.most, np.ceil(plain.tiles))
            held[roomy] = enough[roomy]
        fits = np.logical_and.reduce(held <= stages.most, axis=1)
        for index in np.nonzero(filled)[0].tolist():
            most = self._most_under_way(drafts[index], held[index], stages.wave[index])
            if roomy[index] and most < (stages.wave[index] * held[index]).max():
                held[index] = np.minimum(held[index], np.maximum(most // stages.wave[index], 1))
                most = self._most_under_way(drafts[index], held[index], stages.wave[index])
                fits[index] = (held[index] <= stages.most[index]).all()
            fits[index] &= (stages.wave[index] * held[index]).max() <= most
        return held, fits

    def _most_under_way(self, draft: Draft, held: np.ndarray, wave: np.ndarray) -> float:
        """Up to how many samples every stage has memory for under zero_bubble, where all others may put off as many as are
        under way in one of them, beside the tiles it holds."""
        most = float("inf")
        for (stage, place), hold, samples in zip(placed(draft), held.tolist(), wave.tolist(), strict=True):
            for own in stage.seats:
                room = self.times.room(stage, own, place, "zero_bubble", NEARLY)
                put_off = int((room.free - hold * room.tile) / max(room.put_off, 1.0))
                most = min(most, samples * (hold + put_off + 1) - 1)
        return most

    def _tied(self, draft: Draft) -> float:
        """Seconds to sum a tied head's gradients over the ranks of both ends, and to send its new weights."""
        seats = merged([*draft.stages[0].seats, *draft.stages[-1].seats])
        latency, per_byte = self.times.collective(seats)
        each = self.problem.model.vocab * self.problem.model.hidden / min(own.tp for own in seats)
        return 2 * latency + per_byte * each * (max(4, self.costs.width) + self.costs.width)


class _Together(NamedTuple):
    """Drafts of equally many stages: their stages, seconds of one tile over each boundary [draft, boundary] and around
    [draft, s, t], and whose weights' gradients fill the drain [draft]."""

    drafts: Sequence[Draft]
    stages: StageEstimate
    crossing: np.ndarray
    trips: np.ndarray
    filled: np.ndarray


class _Chained(NamedTuple):
    """A draft, where it stands among others, and its chains: how many are alike, and their sort on each stage."""

    row: int
    draft: Draft
    chains: list[tuple[int, list[Seats]]]

    @property
    def has_one_size(self) -> bool:
        """Whether every chain has one micro-batch all the way."""
        return all(own.micro_batch == sorts[0].micro_batch for _, sorts in self.chains for own in sorts)


def placed(draft: Draft) -> list[tuple[DraftStage, int]]:
    """The stages with their places."""
    last = len(draft.stages) - 1
    return [(stage, position(s == 0, s == last)) for s, stage in enumerate(draft.stages)]


def _depth(draft: Draft) -> int:
    return len(draft.stages)


def _width(own: _Chained) -> int:
    return len(own.chains)


def _is_chained(draft: Draft) -> bool:
    """Whether replica i of every stage gets the same samples, and it matters."""
    if not draft.alike or draft.even or len(draft.stages) == 1 or len(set(draft.replica_counts)) > 1:
        return False
    return any(len(stage.seats) > 1 for stage in draft.stages)
