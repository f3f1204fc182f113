"""The stages of all candidates seen so far, each estimated once: rows of figures, in which candidates are looked up."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hethub.planner.candidate.candidate import PLAIN, Candidate, CandidateStage, Pattern
from hethub.planner.estimate.memory_model import places
from hethub.planner.estimate.stage_figures import Division, Placed, Room, StageEstimate
from hethub.planner.estimate.stage_times import ANY_ROOM, StageTimes


class Divided(NamedTuple):
    """A stage's seconds on its busiest replica's microbatches alone, and samples by groups."""

    seconds: float
    samples: list[int]


class StageRows:
    """Figures of stages. Many new ones at once cost little more than one."""

    def __init__(self, times: StageTimes) -> None:
        self._times = times
        self._rows: dict[object, int] = {}
        self._figures = np.zeros((len(StageEstimate._fields), 0))  # [figure, row]
        self._rooms = np.zeros((len(Room._fields), 0, 1))  # [figure, row, sort]
        self._divided: dict[object, Divided] = {}

    def of(self, candidates: Iterable[Candidate], given: Pattern | None = None) -> list[list[int]]:
        """The rows of every stage of every candidate, under a given pattern or its own."""
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
        """The figures of rows, in their shape."""
        return StageEstimate(*self._figures[:, np.asarray(rows)])

    def rooms(self, rows: np.ndarray) -> Room:
        """What the ranks of every sort have for microbatches, or nearly so, [*rows, sort]."""
        return Room(*self._rooms[:, rows])

    def divided(self, candidates: Sequence[Candidate]) -> list[list[Divided]]:
        """How the stages of every candidate divide the samples."""
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
        """Fills the last rows."""
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
    """The stages with their places."""
    return zip(candidate.stages, places(len(candidate.stages)), strict=True)


def _with_rows(table: np.ndarray, start: int, rows: np.ndarray) -> np.ndarray:
    """The table [figure, row, …] with these rows from `start` on, larger where it is too small."""
    stop = start + rows.shape[1]
    if stop > table.shape[1]:
        table = np.concatenate([table, np.zeros((len(table), stop, *table.shape[2:]))], axis=1)
    table[:, start:stop] = rows
    return table


def _with_sorts(rooms: np.ndarray, width: int) -> np.ndarray:
    """What ranks have for microbatches [figure, row, sort], for so many sorts; those who are nobody have room for
    any."""
    more = np.broadcast_to(np.reshape(ANY_ROOM, (-1, 1, 1)), (*rooms.shape[:2], width - rooms.shape[2]))
    return np.concatenate([rooms, more], axis=2) if more.shape[2] else rooms
