"""`poplar`: Poplar's plans (arXiv 2408.12596). One stage, no TP.

ZeRO-0 and 1 meet once per step: every accelerator works at the micro-batch of its peak speed within its memory, samples
in proportion to speed. ZeRO-2 and 3 meet at every micro-step, so all accelerators share a number of steps, each at the
largest batch that it ends within the step's time; that time is searched. State is cut evenly.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from heapq import nsmallest
from itertools import accumulate
from typing import NamedTuple

from hethub.planner.candidate.candidate import PLAIN, Candidate, CandidateStage, Pattern, ReplicaGroup, merged
from hethub.planner.candidate.materialize import Replica, StageChoice
from hethub.planner.estimate.costs import UnitCosts
from hethub.planner.estimate.estimator import Estimator
from hethub.planner.estimate.memory_model import ONLY
from hethub.planner.generate.families.uniform import units_in_order
from hethub.planner.generate.families.whole import candidate_of, is_allowed, meeting_seconds
from hethub.planner.problem.problem import Problem
from hethub.spec.plan import Recompute
from hethub.spec.ranges import split_by_shares

EVALUATED = 3  # micro-step times that the predictor evaluates


def propose(problem: Problem, costs: Estimator) -> Iterator[Candidate]:
    """A candidate per recompute at ZeRO-0 and 1, where every accelerator can hold the model."""
    if not is_allowed(problem):
        return
    for recompute in problem.recomputes:
        for zero in (level for level in problem.zeros if level < 2):
            # Beyond a few even shares nobody gets a whole microbatch.
            stage, most = _stage(problem, recompute, zero), -(-problem.batch.global_batch // problem.size) * 4
            sizes = [
                max(
                    (size for size in problem.micro_batches if size <= largest),
                    key=lambda size: size / _seconds(problem, costs.unit_costs, k, recompute, size),
                    default=0,
                )
                for k, largest in enumerate(_largest_fitting(problem, costs, stage, most))
            ]
            if all(sizes):
                yield Candidate((stage.with_sizes(sizes),), pattern=Pattern(problem.schedule))


def propose_whole(problem: Problem, costs: Estimator) -> Iterator[Candidate]:
    """The plans of the best micro-step times over recompute and ZeRO-2 and 3."""
    if not is_allowed(problem) or problem.size == 1:
        return
    found = [
        (steps, recompute, zero)
        for recompute in problem.recomputes
        for zero in problem.zeros
        if zero >= 2
        for steps in _shared_steps(problem, costs, recompute, zero)
    ]
    for steps, recompute, zero in nsmallest(EVALUATED, found):
        replicas = _replicas(problem, steps)
        if replicas is not None:
            yield candidate_of(problem, "1f1b", StageChoice(replicas, zero, recompute))


def _stage(problem: Problem, recompute: Recompute, zero: int) -> CandidateStage:
    """All accelerators, a replica each, by device type."""
    groups = [ReplicaGroup(k, 1, 1, device_type.size) for k, device_type in enumerate(problem.device_types)]
    return CandidateStage(problem.model.layers, merged(groups), recompute, zero)


def _largest_fitting(problem: Problem, costs: Estimator, stage: CandidateStage, most: int) -> list[int]:
    """Return for each device type the largest micro-batch with which its ranks fit, up to `most` and to what they measured to
    fit. It is 0 where none fits."""
    groups = (own._replace(micro_batch=problem.at_most(own.device_type, most)) for own in stage.groups)
    return [costs.times.largest(stage, own, ONLY, PLAIN, 1) for own in groups]


def _seconds(problem: Problem, unit_costs: UnitCosts, device_type: int, recompute: Recompute, batch: int) -> float:
    """Return the seconds of a microbatch on the whole model."""
    return unit_costs.rate(device_type, 1, batch, recompute).microbatch(problem.model.layers, True, True).total


class _Steps(NamedTuple):
    """A number of micro-steps and every device type's batch in them."""

    seconds: float
    number: int
    batches: tuple[int, ...]


def _shared_steps(problem: Problem, costs: Estimator, recompute: Recompute, zero: int) -> set[_Steps]:
    """All micro-step times with the largest batches that end within them and fit."""
    total, fixed, unit_costs = problem.batch.global_batch, problem.constraints.micro_batch, costs.unit_costs
    fitting = _largest_fitting(problem, costs, _stage(problem, recompute, zero), max(problem.micro_batches))
    numbers = [device_type.size for device_type in problem.device_types]
    curves = [
        {size: _seconds(problem, unit_costs, k, recompute, size) for size in range(1, most + 1)}
        for k, most in enumerate(fitting)
    ]
    # When microbatches of all sizes end, ascending, and the largest that has ended by then.
    ordered = [sorted((seconds, size) for size, seconds in curve.items()) for curve in curves]
    ends = [[seconds for seconds, _ in own] for own in ordered]
    largest = [[0, *accumulate((size for _, size in own), max)] for own in ordered]
    beside = meeting_seconds(problem, unit_costs, zero)

    def step_seconds(sizes: Sequence[int]) -> float:
        """Seconds of a micro-step: collectives go on beside compute, and slow it down."""
        computing = max(curve[size] for curve, size in zip(curves, sizes, strict=True))
        return max(computing, beside) + unit_costs.network.fit["overlap_cost"] * min(computing, beside)

    found = set()
    for seconds in {seconds for end in ends for seconds in end}:
        batches = [own[bisect_right(end, seconds)] for own, end in zip(largest, ends, strict=True)]
        if 0 not in batches and (fixed is None or set(batches) == {fixed}):
            microstep = sum(size * number for size, number in zip(batches, numbers, strict=True))
            count = -(-total // microstep)
            left = (total - (count - 1) * microstep) / microstep  # of a batch, in the last step
            ending = [max(1, round(left * size)) for size in batches]
            step = (count - 1) * step_seconds(batches) + step_seconds(ending)
            found.add(_Steps(step, count, tuple(batches)))
    return found


def _replicas(problem: Problem, steps: _Steps) -> list[Replica] | None:
    """Every rank's samples: a batch in all steps but the last, which takes what is left; None where that is nothing."""
    units = units_in_order(problem, 1)
    batches = [steps.batches[unit.device_type] for unit in units]
    left = problem.batch.global_batch - (steps.number - 1) * sum(batches)
    last = [part.size for part in split_by_shares(left, batches)]
    samples = [(steps.number - 1) * batch + more for batch, more in zip(batches, last, strict=True)]
    return list(map(Replica, units, batches, samples)) if min(samples) >= 1 else None
