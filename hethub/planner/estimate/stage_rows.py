"""A table with one row for each stage of all candidates seen so far, so that each stage is estimated only once."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hethub.planner.candidate.candidate import PLAIN, Candidate, CandidateStage, Pattern
from hethub.planner.estimate.memory_model import places
from hethub.planner.estimate.stage_figures import Division, Placed, Room, StageEstimate
from hethub.planner.estimate.stage_times import ANY_ROOM, StageTimes


class Divided(NamedTuple):
    """The seconds for which a stage's busiest replica computes, and the samples of a replica of each group."""

    seconds: float
    samples: list[int]


class StageRows:
    """The figures of stages. Adding many new ones at once takes little longer than adding one."""

    def __init__(self, times: StageTimes) -> None:
        self._times = times
        self._rows: dict[object, int] = {}
        self._figures = np.zeros((len(StageEstimate._fields), 0))  # [figure, row]
        self._rooms = np.zeros((len(Room._fields), 0, 1))  # [figure, row, sort]
        self._divided: dict[object, Divided] = {}

    def of(self, candidates: Iterable[Candidate], given: Pattern | None = None) -> list[list[int]]:
        """Return the row of each stage of each candidate, under the given pattern or the candidate's own."""
        known, found = self._rows, []
        new: list[Placed] = []
        for candidate in candidates:
            own, even, pattern = [], candidate.even, given or candidate.pattern
            for stage, place in _placed(candidate):
                key = (stage.core, place, even, pattern)
                row = known.get(key)
                if row is None:
                    row = known[key] = len(known)
                    new.append(Placed(stage, place, even, pattern))
                own.append(row)
            found.append(own)
        if new:
            self._fill(new)
        return found

    def figures(self, rows: Sequence[list[int]] | np.ndarray) -> StageEstimate:
        """Return the figures of these rows, in arrays shaped as `rows`."""
        return StageEstimate(*self._figures[:, np.asarray(rows)])

    def rooms(self, rows: np.ndarray) -> Room:
        """Return the memory that the ranks of each sort have for microbatches, up to NEARLY times the limit: [*rows, sort]."""
        return Room(*self._rooms[:, rows])

    def divided(self, candidates: Sequence[Candidate]) -> list[list[Divided]]:
        """Return how the stages of each candidate divide the samples."""
        known = self._divided
        every = [
            [(stage.core, place, candidate.even) for stage, place in _placed(candidate)] for candidate in candidates
        ]
        new = {
            key: Placed(stage, key[1], key[2], PLAIN)
            for candidate, keys in zip(candidates, every, strict=True)
            for stage, key in zip(candidate.stages, keys, strict=True)
            if key not in known
        }
        if new:
            self._remember(list(new.values()), self._times.divided(list(new.values())))
        return [[known[key] for key in keys] for keys in every]

    def _fill(self, new: Sequence[Placed]) -> None:
        """Estimate the new stages, to which `of` has just given the last rows."""
        figures, division, room = self._times.estimates(new)
        start = len(self._rows) - len(new)
        self._figures = _with_rows(self._figures, start, np.stack(figures))
        width = max(room.free.shape[1], self._rooms.shape[2])
        self._rooms = _with_rows(_with_sorts(self._rooms, width), start, _with_sorts(np.stack(room), width))
        self._remember(new, division)

    def _remember(self, stages: Sequence[Placed], division: Division) -> None:
        for one, seconds, taken in zip(stages, division.least.tolist(), division.taken.tolist(), strict=True):
            samples = [int(count) for count in taken[: len(one.stage.groups)]]
            self._divided[one.stage.core, one.place, one.even] = Divided(seconds, samples)


def _placed(candidate: Candidate) -> Iterator[tuple[CandidateStage, int]]:
    """Return the stages with their places."""
    return zip(candidate.stages, places(len(candidate.stages)), strict=True)


def _with_rows(table: np.ndarray, start: int, rows: np.ndarray) -> np.ndarray:
    """Return the table [figure, row, …] with `rows` written from `start` on, enlarged if it is too small."""
    stop = start + rows.shape[1]
    if stop > table.shape[1]:
        table = np.concatenate([table, np.zeros((len(table), stop, *table.shape[2:]))], axis=1)
    table[:, start:stop] = rows
    return table


def _with_sorts(rooms: np.ndarray, width: int) -> np.ndarray:
    """Return `rooms` [figure, row, sort] for `width` sorts. Sorts without replicas have room for anything."""
    more = np.broadcast_to(np.reshape(ANY_ROOM, (-1, 1, 1)), (*rooms.shape[:2], width - rooms.shape[2]))
    return np.concatenate([rooms, more], axis=2) if more.shape[2] else rooms
