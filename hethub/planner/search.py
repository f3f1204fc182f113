"""`auto`: partitions of every setting, the best of them judged by the predictor, then improved step by step."""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from hethub.planner.costs import UnitCosts
from hethub.planner.draft import Draft, DraftStage, Seat
from hethub.planner.judge import Judge, Verdict
from hethub.planner.moves import neighbours
from hethub.planner.partition import Partition, Partitioner, Setting
from hethub.planner.problem import Problem
from hethub.planner.settings import settings


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much of the space is looked at before the answer is given."""

    finalists: int = 24
    climbs: int = 3
    steps: int = 40


def search(problem: Problem, judge: Judge, effort: Effort, starts: Iterable[Draft] = ()) -> Verdict | None:
    """The best plan found, or None where none fits; `starts` are judged first, so the answer is never worse than they."""
    for draft in starts:
        judge(draft)
    for draft in promising(problem, judge, effort.finalists, list(settings(problem))):
        if judge.out_of_time:
            break
        judge(draft)
    if not judge.fitting:
        return squeeze(problem, judge, effort)
    for leader in sorted(judge.fitting.values(), key=lambda verdict: verdict.seconds)[: effort.climbs]:
        climb(leader, problem, judge, effort.steps)
    return judge.best


def squeeze(problem: Problem, judge: Judge, effort: Effort) -> Verdict | None:
    """Where no partition fitted: the thriftiest settings without regard to memory, improved until one fits, if any."""
    thrifty = [s for s in settings(problem) if s.recompute == problem.recomputes[-1] and s.micro_batches[0] == problem.micro_batches[0]]
    for draft in promising(problem, judge, effort.finalists, thrifty, memory_counts=False):
        judge(draft)
    if judge.best is None and judge.closest is not None:
        climb(judge.closest, problem, judge, effort.steps)
    if judge.best is not None:
        climb(judge.best, problem, judge, effort.steps)
    return judge.best


def promising(
    problem: Problem, judge: Judge, number: int, among: Sequence[Setting], *, memory_counts: bool = True
) -> list[Draft]:
    """The drafts with the smallest estimates over the settings, best first.

    A setting whose lower bound exceeds the worst estimate kept cannot enter and is not partitioned.
    """
    kept: list[tuple[float, int, Draft]] = []
    order = count()
    counts = memory_counts and not judge.ignore_memory
    bounded = [(Partitioner(problem, judge.costs, setting, memory_counts=counts), setting) for setting in among]
    bounded.sort(key=lambda pair: pair[0].bound_seconds)
    for partitioner, setting in bounded:
        if judge.out_of_time or (len(kept) == number and partitioner.bound_seconds >= -kept[0][0]):
            break
        for partition in partitioner.partitions(depths(problem, setting)):
            draft = to_draft(partition, setting, problem)
            entry = (-estimate(draft, partition, judge.costs), next(order), draft)
            if len(kept) < number:
                heapq.heappush(kept, entry)
            elif entry > kept[0]:
                heapq.heapreplace(kept, entry)
    return [draft for _, _, draft in sorted(kept, key=lambda entry: -entry[0])]


def depths(problem: Problem, setting: Setting) -> list[int]:
    """The numbers of stages worth trying for a setting."""
    if setting.replicas is not None:
        found = [len(setting.line) // setting.replicas]
    else:
        found = list(range(1, min(problem.model.layers, len(setting.line), problem.batch.global_batch * 2) + 1))
    return [depth for depth in found if problem.constraints.pp in (None, depth)]


def to_draft(partition: Partition, setting: Setting, problem: Problem) -> Draft:
    """The partition as a draft: units in line order, micro-batches by kind."""
    stages, position = [], 0
    for layers, size in partition.stages:
        units = sorted(setting.line[position : position + size], key=lambda unit: unit.ranks)  # one spelling of equal plans
        position += size
        seats = tuple(Seat(unit, setting.micro_batches[unit.kind]) for unit in units)
        stages.append(DraftStage(layers, seats, setting.recompute, max(problem.zeros[:2])))
    return Draft(tuple(stages))


def estimate(draft: Draft, partition: Partition, costs: UnitCosts) -> float:
    """Seconds of a step: the bottleneck's busy time, and one tile through every other stage."""
    last = len(draft.stages) - 1
    latencies = []
    for index, stage in enumerate(draft.stages):
        sorts = {(s.unit.kind, s.unit.tp, s.micro_batch): s for s in stage.seats}
        tiles = [costs.rate(s.unit, s.micro_batch, stage.recompute).tile(stage.layers, index == 0, index == last) for s in sorts.values()]
        latencies.append(max(tile.total for tile in tiles))
    return partition.deadline_seconds + sum(latencies) - max(latencies)


def climb(verdict: Verdict, problem: Problem, judge: Judge, steps: int) -> Verdict:
    """The best neighbour of the best neighbour … until none is better, the steps are spent or the time is up."""
    best = verdict
    for _ in range(steps):
        better = best
        for draft in neighbours(best.draft, problem):
            if judge.out_of_time:
                return better
            candidate = judge(draft)
            if candidate is not None and judge.better(candidate, better):
                better = candidate
                break
        if better is best:
            return best
        best = better
    return best
