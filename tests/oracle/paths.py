"""Seconds that no plan of some stages is shorter than, following its own microbatches from stage to stage."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hethub.spec.plan import ReplicaSpec
from hethub.spec.schedule.microbatches import deal

Division = tuple[tuple[int, ...], tuple[int, ...]]  # samples and micro-batches of a stage's replicas


class Dealt(NamedTuple):
    """Where the microbatches of divisions lie; behind the last sample S stands nobody's."""

    replica: np.ndarray  # [division, sample], whose microbatch holds it
    start: np.ndarray
    size: np.ndarray
    before: np.ndarray  # the last sample of its replica's microbatch before; S where there is none
    after: np.ndarray  # the first sample of the microbatch after; S where there is none
    same: np.ndarray  # [division, sample, sample], whether one microbatch holds both

    def at(self, divisions: np.ndarray) -> "Dealt":
        return Dealt(*(part[divisions] for part in self))


def dealt(divisions: Sequence[Division], total: int) -> Dealt:
    """The microbatches of every division as the runtime deals them."""
    found = []
    for samples, sizes in divisions:
        replicas = [ReplicaSpec(ranks=(r,), micro_batch=b, samples=samples[r]) for r, b in enumerate(sizes)]
        microbatching = deal(replicas)
        rows: list[tuple[int, int, int, int, int]] = []
        for replica, start, stop in zip(microbatching.replicas, microbatching.starts, microbatching.stops, strict=True):
            owned = [at for at, other in enumerate(microbatching.replicas) if other == replica]
            turn = [microbatching.starts[at] for at in owned].index(start)
            before = microbatching.stops[owned[turn - 1]] - 1 if turn else total
            after = microbatching.starts[owned[turn + 1]] if turn + 1 < len(owned) else total
            rows += [(replica, start, stop - start, before, after)] * (stop - start)
        found.append(rows)
    replica, start, size, before, after = np.array(found).transpose(2, 0, 1)
    return Dealt(replica, start, size, before, after, start[:, :, None] == start[:, None, :])


class Stage(NamedTuple):
    """A stage of many plans [plan]: its microbatches and what they and the update cost."""

    microbatches: Dealt
    forward: np.ndarray  # [plan, sample] of the microbatch that holds it
    backward: np.ndarray
    reduction: np.ndarray  # [plan], of all gradients, from the start of the last backward
    tail: np.ndarray  # at least, from its end
    update: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        return self.forward.shape[0], self.forward.shape[1]


def path_seconds(stages: Sequence[Stage], crossings: Sequence[np.ndarray]) -> np.ndarray:
    """Seconds that no plan is shorter than: down to a replica's first microbatch, through all that it does, and up
    again from its last one. `crossings` are, per boundary, those of a microbatch's part [replica above, replica below,
    samples].

    On the way a microbatch waits for all samples it holds, and for its replica's microbatch before (on the way back,
    those after wait for it). What else a replica may do in between is left out, so this holds for any number of
    microbatches in flight.
    """
    longest = np.zeros(stages[0].shape[0])
    come = gone = np.zeros(stages[0].shape)
    for index, stage in enumerate(stages):
        if index:
            over = _over(stages[index - 1].microbatches, stage.microbatches, crossings[index - 1])
            come, gone = come + over, gone + over
        come, gone = _down(stage, come), _up(stage, gone)
        longest = np.maximum(longest, _through(stage, come, gone))
    return longest


def _over(above: Dealt, below: Dealt, crossing: np.ndarray) -> np.ndarray:
    """Per sample, the seconds of what two microbatches have in common."""
    stop = np.minimum(above.start + above.size, below.start + below.size)
    return crossing[above.replica, below.replica, stop - np.maximum(above.start, below.start)]


def _all_of(microbatches: Dealt, values: np.ndarray) -> np.ndarray:
    """Per sample, the largest value of those in its microbatch."""
    return np.where(microbatches.same, values[:, None, :], 0.0).max(axis=2)


def _down(stage: Stage, come: np.ndarray) -> np.ndarray:
    """Per sample, when its microbatch's forward ends."""
    plans, total = stage.shape
    ends = np.empty((plans, total + 1))
    ends[:, total] = stage.update  # a replica begins when its update is done
    waits = _all_of(stage.microbatches, come)
    for sample in range(total):
        own = ends[np.arange(plans), stage.microbatches.before[:, sample]]
        ends[:, sample] = np.maximum(waits[:, sample], own) + stage.forward[:, sample]
    return ends[:, :total]


def _up(stage: Stage, gone: np.ndarray) -> np.ndarray:
    """Per sample, the seconds from the start of its microbatch's backward to the end of all reductions."""
    plans, total = stage.shape
    left = np.zeros((plans, total + 1))
    waits = _all_of(stage.microbatches, gone)
    alone = np.maximum(stage.tail[:, None], stage.reduction[:, None] - stage.backward)
    for sample in reversed(range(total)):
        after = stage.microbatches.after[:, sample]
        own = np.where(after == total, alone[:, sample], left[np.arange(plans), after])
        left[:, sample] = np.maximum(waits[:, sample], own) + stage.backward[:, sample]
    return left[:, :total]


def _through(stage: Stage, come: np.ndarray, gone: np.ndarray) -> np.ndarray:
    """The longest of the replicas' ways: its first microbatch's forward, all its work in between, its last
    microbatch's backward and what comes behind."""
    total, microbatches = stage.shape[1], stage.microbatches
    work = np.where(microbatches.start == np.arange(total), stage.forward + stage.backward, 0.0)
    found = np.zeros(len(come))
    for replica in range(int(microbatches.replica.max()) + 1):
        own = microbatches.replica == replica
        first = np.where(own & (microbatches.before == total), come - stage.forward, 0.0).max(axis=1)
        last = np.where(own & (microbatches.after == total), gone - stage.backward, 0.0).max(axis=1)
        found = np.maximum(found, first + np.where(own, work, 0.0).sum(axis=1) + last)
    return found
