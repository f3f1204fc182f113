"""The stages of all candidates seen so far, each estimated once: rows of figures, in which candidates are looked up; and
chains of replicas, where replica i of every stage gets the same samples and goes at the pace of the slowest of them."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from hethub.planner.candidate.candidate import PLAIN, Candidate, CandidateStage, Pattern, ReplicaGroup, chains
from hethub.planner.candidate.samples import earliest_finish, within
from hethub.planner.estimate.memory_model import position
from hethub.planner.estimate.stage_figures import Division, Placed, Room, StageEstimate
from hethub.planner.estimate.stage_times import ANY_ROOM, StageTimes


class Divided(NamedTuple):
    """A stage's seconds on its busiest replica's microbatches alone, and by groups samples and seconds of each."""

    seconds: float
    samples: list[int]
    per_sample: dict[ReplicaGroup, float]


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

    def divided_at(self, candidate: Candidate, index: int) -> Divided:
        """How one of a candidate's stages divides the samples."""
        key = (candidate.stages[index].core, _places(len(candidate.stages))[index], candidate.even)
        return self._divided[key] if key in self._divided else self.divided([candidate])[0][index]

    def _fill(self, new: Sequence[Placed]) -> None:
        """Fills the last rows."""
        figures, division, room = self._times.estimates(new)
        start = len(self._rows) - len(new)
        self._figures = _with_rows(self._figures, start, np.stack(figures))
        width = max(room.free.shape[1], self._rooms.shape[2])
        self._rooms = _with_rows(_with_sorts(self._rooms, width), start, _with_sorts(np.stack(room), width))
        self._remember(new, division)

    def _remember(self, stages: Sequence[Placed], division: Division) -> None:
        for one, seconds, taken, per_sample in zip(stages, *(part.tolist() for part in division), strict=True):
            groups = one.stage.groups
            samples = [int(count) for count in taken[: len(groups)]]
            found = Divided(seconds, samples, dict(zip(groups, per_sample, strict=False)))
            self._divided[one.stage.core, one.place, one.even] = found


def _placed(candidate: Candidate) -> Iterator[tuple[CandidateStage, int]]:
    """The stages with their places."""
    return zip(candidate.stages, _places(len(candidate.stages)), strict=True)


@cache
def _places(count: int) -> tuple[int, ...]:
    return tuple(position(s == 0, s == count - 1) for s in range(count))


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


def wait_for_chains(candidates: Sequence[Candidate], stages: StageEstimate, rows: StageRows, samples: int) -> None:
    """Writes into `stages` what waiting for the slowest of a chain adds for the candidates whose replicas i get the same of
    a step's samples in every stage (`materialize`), and whose chains have one micro-batch all the way."""
    alike: dict[tuple[int, int], list[_Chained]] = {}  # equally many stages and chains
    for row, candidate in enumerate(candidates):
        if _is_chained(candidate):
            own = _Chained(row, candidate, chains(candidate))
            if all(one.micro_batch == sorts[0].micro_batch for _, sorts in own.chains for one in sorts):
                alike.setdefault((len(candidate.stages), len(own.chains)), []).append(own)
    for some in alike.values():
        _pace(some, stages, rows, samples)


class _Chained(NamedTuple):
    """A candidate, where it stands among others, and its chains: how many are alike, and their sort on each stage."""

    row: int
    candidate: Candidate
    chains: list[tuple[int, list[ReplicaGroup]]]


def _is_chained(candidate: Candidate) -> bool:
    """Whether replica i of every stage gets the same samples, and it matters."""
    if not candidate.alike or candidate.even or len(candidate.stages) == 1 or len(set(candidate.replica_counts)) > 1:
        return False
    return max([len(stage.groups) for stage in candidate.stages]) > 1


def _pace(some: Sequence[_Chained], stages: StageEstimate, rows: StageRows, samples: int) -> None:
    """Writes into `stages` how long candidates of equally many stages and chains take."""
    divided = rows.divided([own.candidate for own in some])
    per_sample = np.array(  # [candidate, chain, stage]
        [
            [[one.per_sample[sort] for one, sort in zip(each, sorts, strict=True)] for _, sorts in own.chains]
            for own, each in zip(some, divided, strict=True)
        ]
    )
    numbers = np.array([[count for count, _ in own.chains] for own in some])
    sizes = np.array([[sorts[0].micro_batch for _, sorts in own.chains] for own in some])
    slowest = per_sample.max(axis=2)
    taken = np.clip(within(earliest_finish(samples, slowest, numbers), slowest), 1, samples)
    busy, index = (taken[:, :, None] * per_sample).max(axis=1), [own.row for own in some]
    depth = busy.shape[1]
    stages.busy[index, -depth:] = np.maximum(stages.busy[index, -depth:], busy)
    stages.microbatches[index] = (taken / sizes).max(axis=1)[:, None]
