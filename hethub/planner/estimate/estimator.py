"""Estimate a step's seconds in closed form. The search ranks candidates by it, and the predictor evaluates the best.

What is known of each stage (`stage_times`): how long its slowest replica is busy, how long one microbatch takes, and how
long its gradients' reduction takes. The step is the longest of two: the slowest path from the first forward to the last
backward through any one stage, and the slowest cycle in which stages wait for each other because few microbatches are
in flight. All of it is computed for many candidates at once.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from hethub.planner.candidate.candidate import EXTRA_IN_FLIGHT, Candidate, Pattern, merged
from hethub.planner.estimate import in_flight
from hethub.planner.estimate.costs import UnitCosts
from hethub.planner.estimate.stage_figures import StageEstimate
from hethub.planner.estimate.stage_rows import StageRows
from hethub.planner.estimate.stage_times import StageTimes
from hethub.planner.problem.problem import Problem

SLOWER, PACES = 0.9, 10  # paces tried for fewer microbatches in flight where memory is short, each times the one before


class Estimate(NamedTuple):
    """What is estimated of a candidate.

    A stage holds as many microbatches in flight as there are stages from it to the last. A candidate with extra in flight
    holds as many as let the busiest stage work without waiting, if memory allows. No stage holds fewer samples than the
    next one.
    """

    seconds: float  # its step
    holds: tuple[int, ...]  # microbatches in flight per stage
    fits: bool  # whether every rank is within its memory by the closed form, or nearly so
    slowest: int  # the stage whose busiest replica works longest


class Estimator:
    """The cost model of a problem. Stages and candidates that were seen before are looked up, and estimating many
    candidates at once takes little longer than one."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.unit_costs = problem, UnitCosts(problem)
        self.times = StageTimes(problem, self.unit_costs)
        self._rows = StageRows(self.times)
        self._estimated: dict[Candidate, Estimate] = {}

    def estimate(self, candidates: Iterable[Candidate]) -> list[float]:
        """Return the estimated step of each candidate, in seconds. All are computed together and kept, so that asking for
        one of them again is a lookup."""
        asked = list(candidates)
        new = [candidate for candidate in dict.fromkeys(asked) if candidate not in self._estimated]
        alike = defaultdict[object, list[tuple[Candidate, list[int]]]](list)
        for candidate, rows in zip(new, self._rows.of(new), strict=True):
            alike[len(rows), candidate.pattern, candidate.extra_in_flight].append((candidate, rows))
        for some in alike.values():
            own, stages = zip(*some, strict=True)
            self._estimated.update(zip(own, self._estimate(own, np.array(stages)), strict=True))
        return [self._estimated[candidate].seconds for candidate in asked]

    def seconds(self, candidate: Candidate) -> float:
        """Return the estimated step. It is infinite where a stage has more replicas than there are samples, or holds device
        types that may not share a stage."""
        return self.of(candidate).seconds

    def likely_fits(self, candidate: Candidate) -> bool:
        """Whether the candidate fits by the estimate, or so nearly that only the evaluator can tell."""
        return self.of(candidate).fits

    def is_faster(self, candidate: Candidate, seconds: float) -> bool:
        """Whether the estimate is below `seconds` and the candidate likely fits."""
        own = self.of(candidate)
        return own.seconds < seconds and own.fits

    def below(self, candidates: Iterable[Candidate], seconds: float) -> list[Candidate]:
        """Return the candidates whose estimate is below `seconds` and that likely fit, each once."""
        unlike = list(dict.fromkeys(candidates))
        self.estimate(unlike)
        return [candidate for candidate in unlike if self.is_faster(candidate, seconds)]

    def least(self, candidate: Candidate) -> float:
        """Return a lower bound of the predicted step: the seconds for which the busiest replica computes under any
        schedule."""
        return max([own.seconds for own in self._rows.divided([candidate])[0]])

    def bound(self, candidates: Iterable[Candidate]) -> None:
        """Compute the lower bounds of all candidates at once, so that `least` only looks them up."""
        self._rows.divided(list(candidates))

    def samples(self, candidate: Candidate) -> list[list[int]]:
        """Return about how many samples each replica takes, by stage and group."""
        return [own.samples for own in self._rows.divided([candidate])[0]]

    def of(self, candidate: Candidate) -> Estimate:
        """Return everything that is estimated of a candidate."""
        found = self._estimated.get(candidate)
        if found is None:
            self.estimate([candidate])
            found = self._estimated[candidate]
        return found

    def is_possible(self, candidate: Candidate) -> bool:
        """Whether every replica can have a sample and no stage holds device types that may not share one."""
        return (
            max(candidate.replica_counts) <= self.problem.batch.global_batch
            and candidate.is_executable
            and not self.problem.forbids_any(candidate.mixtures)
        )

    def _estimate(self, candidates: Sequence[Candidate], rows: np.ndarray) -> list[Estimate]:
        """Estimate candidates that have equally many stages and one schedule. `rows` [candidate, stage] are the rows of
        their stages."""
        own = self._side_by_side(candidates, rows)
        held, fits = self._held(own)
        seconds = self._seconds(own, held)
        seconds[[not self.is_possible(candidate) for candidate in candidates]] = np.inf
        holds = map(tuple, np.ceil(held).astype(int).tolist())
        return list(map(Estimate, seconds.tolist(), holds, fits.tolist(), own.stages.busy.argmax(axis=1).tolist()))

    def _side_by_side(self, candidates: Sequence[Candidate], rows: np.ndarray) -> "_SideBySide":
        stages = self._rows.figures(rows)
        p2p_seconds = np.array([self.unit_costs.p2p_seconds(own) for own in candidates])
        trips = in_flight.round_trips(stages.microbatch, stages.microstep, p2p_seconds)
        return _SideBySide(candidates, rows, stages, p2p_seconds, trips)

    def _seconds(self, own: "_SideBySide", held: np.ndarray) -> np.ndarray:
        """Return the step of each candidate if its stages hold `held` [candidate, stage] microbatches in flight."""
        stages, p2p_seconds, trips = own.stages, own.p2p_seconds, own.trips
        # Who has the shorter update begins the next step while others still step (predictor/step.py).
        first = stages.finish.min(axis=1)
        drain = np.zeros_like(stages.busy)
        np.cumsum(stages.backward[:, :-1] + p2p_seconds, axis=1, out=drain[:, 1:])
        fill, covered = stages.finish - first[:, None], stages.covered
        if own.pattern.chunks > 1:  # a microbatch goes on after a chunk
            waits, covered = self._between_chunks(own)
            end = (fill[:, :1] + stages.busy + waits).max(axis=1)
        else:
            for s in range(1, fill.shape[1]):
                below = fill[:, s - 1] + stages.forward[:, s - 1] + p2p_seconds[:, s - 1]
                np.maximum(fill[:, s], below, out=fill[:, s])
            away = trips[:, :, -1] - stages.microbatch  # until a microbatch is back from all later stages
            waits = np.maximum(0.0, away - (held - 1) * stages.forward)
            if not own.pattern.defers_wgrad:  # else weights' gradients fill the drain
                waits = waits + np.maximum(0.0, away - (held - 1) * stages.backward) + drain
            end = (fill + stages.busy + waits).max(axis=1)
            if own.depth > 1:
                around = in_flight.slowest_cycle(trips, stages.microstep, held, self.problem.batch.global_batch)
                end = np.maximum(end, stages.finish[:, 0] - first + around)
        reduce = np.maximum(stages.tail, stages.reduce - covered)
        if self.problem.model.tied_head and own.depth > 1:
            reduce[:, [0, -1]] += np.array([[self._tied(candidate)] for candidate in own.candidates])
        return end + np.maximum(0.0, (reduce - drain).max(axis=1)) + first

    def _between_chunks(self, own: "_SideBySide") -> tuple[np.ndarray, np.ndarray]:
        """Return two arrays [candidate, stage] for stages of several chunks: the seconds they wait for microbatches to come
        round the pipeline, and the seconds of their reduction that overlap with their last backwards."""
        stages, chunks, every = own.stages, own.pattern.chunks, np.ceil(own.stages.microbatches)
        if own.pattern.holds_all:
            return in_flight.waits_between_chunks(stages, own.p2p_seconds, every, chunks), stages.covered
        passing = every / np.maximum(1, every // own.depth)
        waits = in_flight.waits_between_chunks(stages, own.p2p_seconds, passing, chunks)
        # Interleaved, links carry both ways at once, and all chunks but the last to be done are reduced beside others.
        carried = (2 * chunks - 1) * every * own.p2p_seconds.max(axis=1, initial=0.0, keepdims=True)
        beside = np.minimum(passing * stages.backward, stages.reduce) * (1 - 1 / chunks)
        return np.maximum(waits, carried - stages.busy), np.maximum(stages.covered, beside)

    def _held(self, own: "_SideBySide") -> tuple[np.ndarray, np.ndarray]:
        """Return the microbatches in flight [candidate, stage], and whether they fit [candidate]."""
        if own.pattern.schedule not in EXTRA_IN_FLIGHT:
            held = self._held_under(own)
        elif own.extra_in_flight and own.depth > 1:
            held = self._enough(own)
        else:
            held = in_flight.default_in_flight(own.stages.microstep)
        return held, self._has_room(own, held, own.stages.most) & self._hosts_have_room(own, held)

    def _hosts_have_room(self, own: "_SideBySide", held: np.ndarray) -> np.ndarray:
        """Whether all hosts together have room for what all ranks offload, for each candidate."""
        hosted = own.stages.host + held * own.stages.host_microbatch
        ranks = np.array([[stage.ranks for stage in candidate.stages] for candidate in own.candidates])
        return (hosted * ranks).sum(axis=1) <= ranks.sum(axis=1)

    def _held_under(self, own: "_SideBySide") -> np.ndarray:
        """Return the microbatches in flight [candidate, stage] under schedules that leave no choice: all of a step, or under
        interleaved those that fill the pipeline (arXiv 2104.04473, §2.2), counted as microbatches of a whole stage."""
        every, chunks = np.ceil(own.stages.microbatches), own.pattern.chunks
        if own.pattern.holds_all:
            return every
        after = own.depth - 1 - np.arange(own.depth)
        return np.minimum((2 * after + (chunks - 1) * own.depth + 1) / chunks, every)

    def _enough(self, own: "_SideBySide") -> np.ndarray:
        """Return the microbatches in flight [candidate, stage] that hide as much waiting as can be hidden. Where memory does
        not allow so many, return those that allow the fastest of several slower paces.

        Under zero_bubble, weights' gradients fill what gaps are left, so as many as under the problem's own schedule will
        do. A candidate may ask for more, which leave no gaps at all."""
        plain, trips = own.stages, own.trips
        if own.pattern.defers_wgrad:
            plain = self._rows.figures(self._rows.of(own.candidates, Pattern(self.problem.schedule)))
            trips = in_flight.round_trips(plain.microbatch, plain.microstep, own.p2p_seconds)
        pace = self.problem.batch.global_batch / plain.busy.max(axis=1) * SLOWER ** np.arange(PACES + 1)[:, None]
        fewer = in_flight.enough_in_flight(trips, plain.microstep, pace, np.ceil(plain.microbatches))
        able = self._has_room(own, fewer, own.stages.sure)
        able[-1] = True
        held = fewer[able.argmax(axis=0), np.arange(len(own.rows))]
        return held if own.extra_in_flight == 1 else self._without_waits(own, held)

    def _without_waits(self, own: "_SideBySide", held: np.ndarray) -> np.ndarray:
        """Return the microbatches in flight [candidate, stage] under zero_bubble with which no stage waits: as many as it
        can send on before the first comes back. Where memory is short, return as many of the additional ones (beyond
        `held`) as there is room for. No stage gets more additional ones than the stage before it, since two neighbours
        that hold equally many wait for each other."""
        stages, micro = own.stages, own.stages.microstep
        sent = in_flight.sent_until_back(own.trips[:, :, -1] - stages.microbatch, stages.forward, micro)
        most = np.minimum(sent, np.minimum(stages.sure, np.ceil(stages.microbatches)))

        def stepped(most: np.ndarray) -> np.ndarray:
            more = np.minimum.accumulate(np.maximum(most - held, 0) * micro, axis=1)
            return held + np.floor(more / micro)

        wanted = stepped(most)
        room = np.floor(self._most_under_way(own, wanted)[:, None] / micro)  # beside what is put off
        wanted = stepped(np.where(self._has_room(own, wanted, stages.sure)[:, None], wanted, np.minimum(most, room)))
        return np.where(self._has_room(own, wanted, stages.sure)[:, None], wanted, held)

    def _has_room(self, own: "_SideBySide", held: np.ndarray, most: np.ndarray) -> np.ndarray:
        """Whether no stage holds more than its `most` [candidate, stage] of `held` [..., candidate, stage], and every stage
        has room for the weights' gradients that zero_bubble may put off: [..., candidate]."""
        able = np.all(held <= most, axis=-1)
        if own.pattern.defers_wgrad:
            able &= (own.stages.microstep * held).max(axis=-1) <= self._most_under_way(own, held)
        return able

    def _most_under_way(self, own: "_SideBySide", held: np.ndarray) -> np.ndarray:
        """Return how many samples may be under way under zero_bubble, [..., candidate], so that every stage has memory for
        them: beside the microbatches it holds, it may have to put off the weights' gradients of as many samples as are
        under way in any other stage, but never of more than it has."""
        free, microbatch, each = self._rows.rooms(own.rows)  # [candidate, stage, sort]
        deferred_wgrad = np.trunc((free - held[..., None] * microbatch) / np.maximum(each, 1.0)).min(axis=-1)
        boundless = deferred_wgrad >= np.maximum(np.ceil(own.stages.microbatches) - held, 0)
        most = np.where(boundless, np.inf, own.stages.microstep * (held + deferred_wgrad + 1) - 1)
        return most.min(axis=-1)

    def _tied(self, candidate: Candidate) -> float:
        """Return the seconds that a tied head takes: to sum its gradients over the ranks of both ends of the pipeline, and
        to send its new weights."""
        groups = merged([*candidate.stages[0].groups, *candidate.stages[-1].groups])
        latency, per_byte = self.times.collective(groups)
        each = self.problem.model.vocab * self.problem.model.hidden / min(own.tp for own in groups)
        return 2 * latency + per_byte * each * (self.unit_costs.gradient_width + self.unit_costs.width)


class _SideBySide(NamedTuple):
    """Candidates of equally many stages under one schedule: the rows of their stages [candidate, stage], the figures in
    these rows, the seconds of one microbatch over each boundary [candidate, boundary], and those of its round trip from
    stage s to stage t and back [candidate, s, t]."""

    candidates: Sequence[Candidate]
    rows: np.ndarray
    stages: StageEstimate
    p2p_seconds: np.ndarray
    trips: np.ndarray

    @property
    def pattern(self) -> Pattern:
        return self.candidates[0].pattern

    @property
    def extra_in_flight(self) -> int:
        return self.candidates[0].extra_in_flight

    @property
    def depth(self) -> int:
        """The number of stages of each candidate."""
        return self.rows.shape[1]
