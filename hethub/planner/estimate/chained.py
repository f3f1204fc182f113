"""Chains of replicas that stay apart: replica i of every stage gets the same samples, and goes at the pace of the
slowest stage of its chain."""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from hethub.planner.candidate.candidate import Candidate, ReplicaGroup, chains
from hethub.planner.candidate.samples import earliest_finish, within
from hethub.planner.estimate.stage_figures import StageEstimate
from hethub.planner.estimate.stage_rows import StageRows


def wait_for_chains(candidates: Sequence[Candidate], stages: StageEstimate, rows: StageRows, samples: int) -> None:
    """Writes into `stages` what waiting for the slowest of a chain adds for the candidates whose replicas i get the same of
    a step's samples in every stage (`materialize`)."""
    found = [
        _Chained(row, candidate, chains(candidate))
        for row, candidate in enumerate(candidates)
        if _is_chained(candidate)
    ]
    alike = sorted((own for own in found if own.has_one_size), key=_extent)
    for _, own in groupby(alike, key=_extent):
        _pace(list(own), stages, rows, samples)


class _Chained(NamedTuple):
    """A candidate, where it stands among others, and its chains: how many are alike, and their sort on each stage."""

    row: int
    candidate: Candidate
    chains: list[tuple[int, list[ReplicaGroup]]]

    @property
    def has_one_size(self) -> bool:
        """Whether every chain has one micro-batch all the way."""
        return all(own.micro_batch == sorts[0].micro_batch for _, sorts in self.chains for own in sorts)


def _is_chained(candidate: Candidate) -> bool:
    """Whether replica i of every stage gets the same samples, and it matters."""
    if not candidate.alike or candidate.even or len(candidate.stages) == 1 or len(set(candidate.replica_counts)) > 1:
        return False
    return max([len(stage.groups) for stage in candidate.stages]) > 1


def _extent(own: _Chained) -> tuple[int, int]:
    return len(own.candidate.stages), len(own.chains)


def _pace(own: Sequence[_Chained], stages: StageEstimate, rows: StageRows, samples: int) -> None:
    """Writes into `stages` how long candidates of equally many stages and chains take."""
    per_sample = np.array([_along(one, rows) for one in own])  # [candidate, chain, stage]
    numbers = np.array([[count for count, _ in one.chains] for one in own])
    sizes = np.array([[sorts[0].micro_batch for _, sorts in one.chains] for one in own])
    slowest = per_sample.max(axis=2)
    taken = np.clip(within(earliest_finish(samples, slowest, numbers), slowest), 1, samples)
    busy, index = (taken[:, :, None] * per_sample).max(axis=1), [one.row for one in own]
    depth = busy.shape[1]
    stages.busy[index, -depth:] = np.maximum(stages.busy[index, -depth:], busy)
    stages.microbatches[index] = (taken / sizes).max(axis=1)[:, None]


def _along(own: _Chained, rows: StageRows) -> list[list[float]]:
    """[chain, stage]: seconds per sample."""
    (stages,) = rows.divided([own.candidate])
    return [[one.per_sample[sort] for one, sort in zip(stages, sorts, strict=True)] for _, sorts in own.chains]
