"""A step's seconds in closed form: ranks candidates before the predictor evaluates the best of them.

Per stage (`stage_times`): the exact busy time of its slowest replica, one microbatch's latency, the gradients'
reduction. Over stages: the slowest way from the first forward to the last backward through each stage under 1F1B, and
the slowest critical cycle that microbatches in flight allow; for many candidates at once.
"""

from collections.abc import Iterable, Sequence
from itertools import compress, groupby
from typing import NamedTuple

import numpy as np

from hethub.planner.candidate.candidate import Candidate, Pattern, merged
from hethub.planner.estimate import in_flight
from hethub.planner.estimate.costs import UnitCosts
from hethub.planner.estimate.stage_figures import StageEstimate
from hethub.planner.estimate.stage_rows import StageRows
from hethub.planner.estimate.stage_times import StageTimes
from hethub.planner.problem.problem import Problem

SLOWER, PACES = 0.9, 10  # paces tried for fewer microbatches in flight where memory is short, each times the one before


class Estimate(NamedTuple):
    """What is estimated of a candidate.

    Microbatches in flight are by depth, or with extra in flight as many as the critical cycles need to run at the pace of
    the busiest stage, where they fit; never fewer than the stage below holds.
    """

    seconds: float  # its step
    holds: tuple[int, ...]  # microbatches in flight per stage
    fits: bool  # whether every rank is within its memory by the closed form, or nearly so
    slowest: int  # the stage whose busiest replica works longest


class Estimator:
    """The cost model of a problem. Stages and candidates seen before cost nothing, many at once little more than
    one."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.unit_costs = problem, UnitCosts(problem)
        self.times = StageTimes(problem, self.unit_costs)
        self._rows = StageRows(self.times)
        self._estimated: dict[Candidate, Estimate] = {}

    def estimate(self, candidates: Iterable[Candidate]) -> list[float]:
        """The estimated steps of all candidates at once. Asking for each is then for nothing."""
        asked = list(candidates)
        new = [candidate for candidate in dict.fromkeys(asked) if candidate not in self._estimated]
        rows = self._rows.of(new)
        ranked = sorted(zip(new, rows, strict=True), key=lambda own: len(own[1]))
        for _, alike in groupby(ranked, key=_depth):
            own, stages = zip(*alike, strict=True)
            self._estimated.update(zip(own, self._estimate(own, stages), strict=True))
        return [self._estimated[candidate].seconds for candidate in asked]

    def seconds(self, candidate: Candidate) -> float:
        """The estimated step; infinite where a stage has more replicas than samples, or where it mixes what it must
        not."""
        return self.of(candidate).seconds

    def likely_fits(self, candidate: Candidate) -> bool:
        """Whether it fits, or so nearly that only the evaluator can tell."""
        return self.of(candidate).fits

    def is_faster(self, candidate: Candidate, seconds: float) -> bool:
        """Whether the estimate is below `seconds` and the candidate likely fits."""
        return self.seconds(candidate) < seconds and self.likely_fits(candidate)

    def below(self, candidates: Iterable[Candidate], seconds: float) -> list[Candidate]:
        """The unlike ones of the candidates whose estimate is below `seconds` and that likely fit."""
        unlike = list(dict.fromkeys(candidates))
        self.estimate(unlike)
        return [candidate for candidate in unlike if self.is_faster(candidate, seconds)]

    def least(self, candidate: Candidate) -> float:
        """Seconds that the candidate's busiest replica computes at least, whatever the schedule: no prediction is
        shorter."""
        return max([own.seconds for own in self._rows.divided([candidate])[0]])

    def bound(self, candidates: Iterable[Candidate]) -> None:
        """Finds for all candidates at once what they compute at least. Asking for each then takes little."""
        self._rows.divided(list(candidates))

    def samples(self, candidate: Candidate) -> list[list[int]]:
        """About how many samples each replica takes, by stages and groups."""
        return [own.samples for own in self._rows.divided([candidate])[0]]

    def of(self, candidate: Candidate) -> Estimate:
        """All that is estimated of a candidate."""
        if candidate not in self._estimated:
            self.estimate([candidate])
        return self._estimated[candidate]

    def is_possible(self, candidate: Candidate) -> bool:
        """Whether every replica can have a sample and no stage mixes what it must not."""
        return (
            max(candidate.replica_counts) <= self.problem.batch.global_batch
            and candidate.is_executable
            and not self.problem.forbids_any(candidate.mixtures)
        )

    def _estimate(self, candidates: Sequence[Candidate], rows: Sequence[list[int]]) -> list[Estimate]:
        """Candidates whose stages stand in these rows."""
        own = self._side_by_side(candidates, rows)
        held, fits = self._held(own)
        seconds = self._seconds(own, held)
        seconds[[not self.is_possible(candidate) for candidate in candidates]] = np.inf
        holds = [
            tuple(each[first:])
            for each, first in zip(np.ceil(held).astype(int).tolist(), own.first.tolist(), strict=True)
        ]
        slowest = (own.stages.busy.argmax(axis=1) - own.first).tolist()
        return list(map(Estimate, seconds.tolist(), holds, fits.tolist(), slowest))

    def _side_by_side(self, candidates: Sequence[Candidate], rows: Sequence[list[int]]) -> "_SideBySide":
        """The candidates with their stages in arrays that end with the last. In front of the first stage of shorter
        ones stands a blank: the stage once more, without any work."""
        depth = len(rows[-1])  # the largest, of candidates in order
        first = np.array([depth - len(own) for own in rows])
        table = np.array([own[:1] * (depth - len(own)) + own for own in rows])
        p2p_seconds = np.array(
            [[0.0] * (depth - len(own.stages)) + self.unit_costs.p2p_seconds(own) for own in candidates]
        )
        p2p_seconds = p2p_seconds.reshape(len(candidates), -1)
        blank = np.arange(depth) < first[:, None]
        stages = self._stages(table, blank)
        filled = np.array([candidate.pattern.defers_wgrad for candidate in candidates])
        trips = in_flight.round_trips(stages.microbatch, stages.microstep, p2p_seconds)
        return _SideBySide(candidates, table, first, blank, stages, p2p_seconds, trips, filled)

    def _seconds(self, own: "_SideBySide", held: np.ndarray) -> np.ndarray:
        """[candidate]: the step with so many microbatches in flight."""
        stages, p2p_seconds, trips, several = own.stages, own.p2p_seconds, own.trips, own.several
        # Who has the shorter update begins the next step while others still step (predictor/step.py).
        first = stages.finish.min(axis=1)
        # Until a microbatch is back from all later stages.
        away = np.where(own.blank, 0.0, trips[:, :, -1] - stages.microbatch)
        slack = np.maximum(0.0, away - (held - 1) * stages.forward)
        gap = slack + np.maximum(0.0, away - (held - 1) * stages.backward)
        drain = np.zeros_like(away)
        np.cumsum(stages.backward[:, :-1] + p2p_seconds, axis=1, out=drain[:, 1:])
        fill = stages.finish - first[:, None]
        for s in range(1, fill.shape[1]):
            below = fill[:, s - 1] + stages.forward[:, s - 1] + p2p_seconds[:, s - 1]
            np.maximum(fill[:, s], below, out=fill[:, s])
        # Under zero_bubble, weights' gradients fill the drain.
        waits = np.where(own.filled[:, None], slack, gap + drain)
        chunks = np.array([candidate.pattern.chunks for candidate in own.candidates])[:, None]
        covered = stages.covered
        if (chunks > 1).any():  # a microbatch goes on after a chunk
            between, beside = self._between_chunks(own, chunks)
            waits, covered = np.where(chunks > 1, between, waits), np.where(chunks > 1, beside, covered)
            fill = np.where(chunks > 1, fill[:, :1], fill)
        end = (fill + stages.busy + waits).max(axis=1)
        if several.any():
            around = in_flight.slowest_cycle(trips, stages.microstep, held, self.problem.batch.global_batch, own.first)
            end = np.where(several & (chunks[:, 0] == 1), np.maximum(end, stages.finish[:, 0] - first + around), end)
        reduce = np.maximum(stages.tail, stages.reduce - covered)
        if self.problem.model.tied_head:
            tied = np.array(
                [self._tied(candidate) if len(candidate.stages) > 1 else 0.0 for candidate in own.candidates]
            )
            reduce[np.arange(len(tied)), own.first] += tied
            reduce[:, -1] += tied
        shown = np.maximum(0.0, (reduce - drain).max(axis=1))
        return end + shown + first

    def _between_chunks(self, own: "_SideBySide", chunks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[candidate, stage]: seconds that stages of so many chunks [candidate, 1] wait for microbatches to come round, and
        those of their reduction that go beside their last backwards."""
        stages, depth = own.stages, own.rows.shape[1] - own.first[:, None]
        every = np.ceil(stages.microbatches)
        all_at_once = np.array([candidate.pattern.holds_all for candidate in own.candidates])[:, None]
        passing = np.where(all_at_once, every, every / np.maximum(1, every // depth))
        waits = in_flight.waits_between_chunks(stages, own.p2p_seconds, passing, chunks)
        # Interleaved, links carry both ways at once, and all chunks but the last to be done are reduced beside others.
        carried = (2 * chunks - 1) * every * own.p2p_seconds.max(axis=1, initial=0.0, keepdims=True)
        beside = np.minimum(passing * stages.backward, stages.reduce) * (1 - 1 / chunks)
        waits = np.where(all_at_once, waits, np.maximum(waits, carried - stages.busy))
        return waits, np.where(all_at_once, stages.covered, np.maximum(stages.covered, beside))

    def _stages(self, rows: np.ndarray, blank: np.ndarray) -> StageEstimate:
        """Every stage of every candidate by itself."""
        stages = self._rows.figures(rows)
        for work in (stages.busy, stages.forward, stages.backward, stages.reduce, stages.tail):
            work[blank] = 0.0
        return stages

    def _held(self, own: "_SideBySide") -> tuple[np.ndarray, np.ndarray]:
        """Microbatches in flight [candidate, stage], and whether they fit [candidate]."""
        stages, filled, held = own.stages, own.filled, in_flight.default_in_flight(own.stages.microstep)
        patterns = [candidate.pattern for candidate in own.candidates]
        alone = np.array([pattern.schedule not in ("1f1b", "zero_bubble") for pattern in patterns])
        extra = np.array([candidate.extra_in_flight > 0 for candidate in own.candidates]) & own.several & ~alone
        if alone.any():
            held[alone] = self._held_under(own.at(alone), list(compress(patterns, alone)))
        if extra.any():
            held[extra] = self._enough(own.at(extra))
        able = np.ones(len(held), dtype=bool)
        if filled.any():
            able[filled] = self._has_room_to_defer_wgrad(own.at(filled), held[filled])
        able &= ((held <= stages.most) | own.blank).all(axis=1)
        return held, able & self._hosts_have_room(own, held)

    def _hosts_have_room(self, own: "_SideBySide", held: np.ndarray) -> np.ndarray:
        """[candidate]: whether all hosts together have room for what all ranks offload."""
        hosted = np.where(own.blank, 0.0, own.stages.host + held * own.stages.host_microbatch)
        ranks = np.array(
            [[0] * (held.shape[1] - len(c.stages)) + [stage.ranks for stage in c.stages] for c in own.candidates]
        )
        return (hosted * ranks).sum(axis=1) <= ranks.sum(axis=1)

    def _held_under(self, own: "_SideBySide", patterns: Sequence[Pattern]) -> np.ndarray:
        """[candidate, stage]: microbatches held under schedules that leave no choice: all, or interleaved what fills
        the pipeline (arXiv 2104.04473, §2.2), in whole stages' microbatches."""
        every, depth = np.ceil(own.stages.microbatches), own.rows.shape[1]
        after = depth - 1 - np.arange(depth)
        chunks = np.array([pattern.chunks for pattern in patterns])[:, None]
        filling = (2 * after + (chunks - 1) * (depth - own.first[:, None]) + 1) / chunks
        some = np.array([not pattern.holds_all for pattern in patterns])[:, None]
        return np.where(some, np.minimum(filling, every), every)

    def _enough(self, own: "_SideBySide") -> np.ndarray:
        """[candidate, stage]: as many microbatches in flight as hide what can be hidden. Where weights' gradients are
        put off, as many as under the problem's schedule keep the gaps to be filled few; more, where wanted, leave none."""
        plain, trips = own.stages, own.trips
        if own.filled.any():
            rows = self._rows.of(own.candidates, Pattern(self.problem.schedule))
            table = [blanks * row[:1] + row for blanks, row in zip(own.first.tolist(), rows, strict=True)]
            plain = self._stages(np.array(table), own.blank)
            trips = in_flight.round_trips(plain.microbatch, plain.microstep, own.p2p_seconds)
        every, micro = np.ceil(plain.microbatches), plain.microstep
        pace = self.problem.batch.global_batch / plain.busy.max(axis=1)
        held = in_flight.enough_in_flight(trips, micro, pace, every)
        short = ~self._surely_fits(own, held)
        if short.any():
            slower = pace[short] * SLOWER ** np.arange(1, PACES + 1)[:, None]
            fewer = in_flight.enough_in_flight(trips[short], micro[short], slower, every[short])
            able = self._surely_fits(own.at(short), fewer)
            able[-1] = True
            held[short] = fewer[able.argmax(axis=0), np.arange(len(able[0]))]
        more = own.filled & np.array([candidate.extra_in_flight > 1 for candidate in own.candidates])
        if more.any():
            held[more] = self._without_waits(own.at(more), held[more])
        return held

    def _without_waits(self, own: "_SideBySide", held: np.ndarray) -> np.ndarray:
        """[candidate, stage]: as many microbatches in flight under zero_bubble as a stage can send down until the first
        is back, or as near to that from those `held` as there is memory: none gets more than the stage above it does,
        since two stages that hold as many wait for each other."""
        stages, micro = own.stages, own.stages.microstep
        sent = in_flight.sent_until_back(own.trips[:, :, -1] - stages.microbatch, stages.forward, micro)
        most = np.minimum(sent, np.minimum(stages.sure, np.ceil(stages.microbatches)))

        def stepped(most: np.ndarray) -> np.ndarray:
            more = np.minimum.accumulate(np.maximum(most - held, 0) * micro, axis=1)
            return held + np.floor(more / micro)

        wanted = stepped(most)
        room = np.floor(self._most_under_way(own, wanted)[:, None] / micro)  # beside what is put off
        wanted = stepped(np.where(self._surely_fits(own, wanted)[:, None], wanted, np.minimum(most, room)))
        return np.where(self._surely_fits(own, wanted)[:, None], wanted, held)

    def _surely_fits(self, own: "_SideBySide", held: np.ndarray) -> np.ndarray:
        """[..., candidate]: whether every stage has room for its microbatches in flight [..., candidate, stage], and for what
        it may put off."""
        able = ((held <= own.stages.sure) | own.blank).all(axis=-1)
        if own.filled.any():
            able[..., own.filled] &= self._has_room_to_defer_wgrad(own.at(own.filled), held[..., own.filled, :])
        return able

    def _has_room_to_defer_wgrad(self, own: "_SideBySide", held: np.ndarray) -> np.ndarray:
        """[..., candidate]: whether under zero_bubble there is memory for what is put off."""
        widest = np.where(own.blank, 0.0, own.stages.microstep * held).max(axis=-1)
        return widest <= self._most_under_way(own, held)

    def _most_under_way(self, own: "_SideBySide", held: np.ndarray) -> np.ndarray:
        """[..., candidate]: up to how many samples every stage has memory for under zero_bubble, where all others may put
        off as many as are under way in one of them, beside the microbatches it holds, but no more than it has."""
        free, microbatch, each = self._rows.rooms(own.rows)  # [candidate, stage, sort]
        deferred_wgrad = np.trunc((free - held[..., None] * microbatch) / np.maximum(each, 1.0)).min(axis=-1)
        boundless = own.blank | (deferred_wgrad >= np.maximum(np.ceil(own.stages.microbatches) - held, 0))
        most = np.where(boundless, np.inf, own.stages.microstep * (held + deferred_wgrad + 1) - 1)
        return most.min(axis=-1)

    def _tied(self, candidate: Candidate) -> float:
        """Seconds to sum a tied head's gradients over the ranks of both ends, and to send its new weights."""
        groups = merged([*candidate.stages[0].groups, *candidate.stages[-1].groups])
        latency, per_byte = self.times.collective(groups)
        each = self.problem.model.vocab * self.problem.model.hidden / min(own.tp for own in groups)
        return 2 * latency + per_byte * each * (self.unit_costs.gradient_width + self.unit_costs.width)


class _SideBySide(NamedTuple):
    """Candidates side by side: the rows of their stages, where the first of these is and where none, their figures,
    seconds of one microbatch over each boundary [candidate, boundary] and around [candidate, s, t], and whose weights'
    gradients fill the drain [candidate]."""

    candidates: Sequence[Candidate]
    rows: np.ndarray
    first: np.ndarray
    blank: np.ndarray
    stages: StageEstimate
    p2p_seconds: np.ndarray
    trips: np.ndarray
    filled: np.ndarray

    @property
    def several(self) -> np.ndarray:
        """[candidate]: whether it has several stages."""
        return self.first < self.rows.shape[1] - 1

    def at(self, chosen: np.ndarray) -> "_SideBySide":
        """Some of the candidates."""
        if chosen.all():
            return self
        candidates = list(compress(self.candidates, chosen))
        places = (self.rows[chosen], self.first[chosen], self.blank[chosen])
        stages = StageEstimate(*(figure[chosen] for figure in self.stages))
        return _SideBySide(
            candidates, *places, stages, self.p2p_seconds[chosen], self.trips[chosen], self.filled[chosen]
        )


def _depth(own: tuple[Candidate, list[int]]) -> int:
    """By which candidates are estimated together: up to twice as many stages."""
    return (len(own[1]) - 1).bit_length()
