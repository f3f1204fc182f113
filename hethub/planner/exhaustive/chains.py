"""The longest way down to a replica's first microbatch, through all its work, and back up from its last one: a bound
on many points at once that knows which samples every microbatch holds."""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from hethub.planner.exhaustive.stages import StageOptions, in_rounds

AT_ONCE = 8192  # points, whose arrays stay small

T = TypeVar("T")


class Chains:
    """What bounds the points of branches under one schedule that have as many replicas in every stage: [stage][branch]
    of options, [boundary][branch] of crossings."""

    def __init__(self, stages: Sequence[Sequence[StageOptions]], p2p_costs: Sequence[Sequence[np.ndarray]]) -> None:
        self.stages = [ChainStage(own) for own in stages]
        self.boundaries = [ChainBoundary(own) for own in p2p_costs]

    def bounds(self, branches: np.ndarray, options: np.ndarray) -> np.ndarray:
        """Seconds that no point is shorter than, given by its branch and options [point, stage]."""
        parts = [slice(first, first + AT_ONCE) for first in range(0, len(branches), AT_ONCE)]
        return np.concatenate([np.zeros(0), *(self._bounds(branches[part], options[part]) for part in parts)])

    def _bounds(self, branches: np.ndarray, options: np.ndarray) -> np.ndarray:
        """A replica begins when its first microbatch has come down, each microbatch on the way as soon as its samples
        are there and its replica has run those before it; so does what comes back up, seen from the end. In between it
        does all its work."""
        down = up = found = np.zeros(len(branches))
        above: _Dealt | None = None
        for index, stage in enumerate(self.stages):
            rows, ways = stage.rows(branches, options[:, index])
            cut = stage.microbatchings
            dealt = _Dealt(cut.replicas[ways], cut.starts[ways], cut.stops[ways])
            work = _Work.of(stage, rows, ways)
            if above is None:
                down = up = np.zeros(dealt.replicas.shape)
            else:
                across = self.boundaries[index - 1].seconds(branches, above, dealt)
                down, up = down + across, up + across
            forward, backward = (stage.of_samples(rows, ways, pass_index, dealt) for pass_index in (0, 1))
            down = _passed(dealt, down, stage.updates[rows], forward)
            up = _passed(dealt.mirrored, up[:, ::-1], work.left, backward[:, ::-1])[:, ::-1]
            begun = np.take_along_axis(down, cut.firsts[ways], axis=1) - work.first
            back = np.take_along_axis(up, cut.lasts[ways], axis=1)
            whole = np.maximum(back + work.before_last, work.busy + work.reduced)
            found, above = np.maximum(found, (begun + whole).max(axis=1)), dealt
        return found


class ChainStage:
    """A stage of many branches, the modes of all its options as arrays."""

    def __init__(self, options: Sequence[StageOptions]) -> None:
        every, number_of = _unlike(options)
        modes = [mode for own in every for mode in own.modes]
        self.microbatchings = every[0].microbatchings
        self.last_pass = modes[0].last_pass
        self.updates = np.stack([mode.updates for mode in modes])  # [mode, replica]
        self.seconds = np.stack([mode.seconds for mode in modes], axis=1)  # [3, mode, pass, replica, samples]
        self.reductions = np.array([mode.reduction[:2] for mode in modes])
        self._first_of = np.cumsum([0, *(len(own.modes) for own in every)])[number_of]

    def rows(self, branches: np.ndarray, options: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The modes and the microbatchings that options of branches are."""
        modes, ways = np.divmod(options, len(self.microbatchings))
        return self._first_of[branches] + modes, ways

    def of_samples(self, rows: np.ndarray, ways: np.ndarray, pass_index: int, dealt: "_Dealt") -> np.ndarray:
        """Seconds of each sample's microbatch in a pass: [point, sample]."""
        found = self.seconds[:, rows[:, None], pass_index, dealt.replicas, dealt.stops - dealt.starts]
        return in_rounds(found, self.microbatchings.rounds[ways, :1])


class ChainBoundary:
    """What lies between two stages of many branches, in arrays [unlike, replica above, replica below, samples]."""

    def __init__(self, p2p_costs: Sequence[np.ndarray]) -> None:
        every, self._number_of = _unlike(p2p_costs)
        self._seconds = np.stack(every)

    def seconds(self, branches: np.ndarray, above: "_Dealt", below: "_Dealt") -> np.ndarray:
        """Seconds of what comes with each sample."""
        shared = np.minimum(above.stops, below.stops) - np.maximum(above.starts, below.starts)
        return self._seconds[self._number_of[branches][:, None], above.replicas, below.replicas, shared]


def _unlike(parts: Sequence[T]) -> tuple[list[T], np.ndarray]:
    """The objects among these, each once, and by branch the number of its own."""
    unlike = {id(own): own for own in parts}
    number_of = {key: number for number, key in enumerate(unlike)}
    return list(unlike.values()), np.array([number_of[id(own)] for own in parts])


class _Dealt(NamedTuple):
    """The microbatches of a stage by point and sample."""

    replicas: np.ndarray
    starts: np.ndarray
    stops: np.ndarray

    @property
    def mirrored(self) -> "_Dealt":
        """The sample axis from its end."""
        total = self.replicas.shape[1]
        return _Dealt(self.replicas[:, ::-1], total - self.stops[:, ::-1], total - self.starts[:, ::-1])


class _Work(NamedTuple):
    """What replicas have to do, by point and replica."""

    first: np.ndarray  # seconds of the first forward
    busy: np.ndarray  # of everything
    before_last: np.ndarray  # of all forwards and backwards but the last
    reduced: np.ndarray  # from the last pass to the end of the reduction
    left: np.ndarray  # from the last backward to there

    @classmethod
    def of(cls, stage: ChainStage, rows: np.ndarray, ways: np.ndarray) -> "_Work":
        samples, sizes = stage.microbatchings.samples[ways], stage.microbatchings.sizes[ways]
        whole, rest = np.divmod(samples, sizes)
        replicas = np.arange(samples.shape[1])
        rounds = stage.microbatchings.rounds[ways][..., None]
        full, short, last = (
            in_rounds(np.moveaxis(stage.seconds[:, rows[:, None], :, replicas, size], 2, 0), rounds)
            for size in (sizes, rest, np.where(rest > 0, rest, sizes))
        )  # [point, replica, pass]
        spent = (whole[..., None] * full + short)[..., :3]
        seconds, tail = stage.reductions[rows].T
        tail = tail + full[..., 3].min(axis=1)
        reduced = np.maximum(tail[:, None], seconds[:, None] - last[..., stage.last_pass])
        passed = spent[..., :2].sum(axis=2)
        return cls(full[..., 0], spent.sum(axis=2), passed - last[..., 1], reduced, last[..., 2] + reduced)


def _passed(dealt: _Dealt, ready: np.ndarray, begins: np.ndarray, spent: np.ndarray) -> np.ndarray:
    """Return when the microbatch of each sample ends [point, sample]. It begins when its last sample is ready and its replica is
    free. Replicas are free from `begins` [point, replica] on."""
    free, ends, latest = begins.copy(), np.empty(ready.shape), ready[:, 0]
    for sample, here in enumerate(ready.T):
        latest = np.where(dealt.starts[:, sample] == sample, here, np.maximum(latest, here))
        closing = np.nonzero(dealt.stops[:, sample] == sample + 1)[0]
        own = dealt.replicas[closing, sample]
        stop = np.maximum(latest[closing], free[closing, own]) + spent[closing, sample]
        free[closing, own] = ends[closing, sample] = stop
    return np.take_along_axis(ends, dealt.stops - 1, axis=1)
