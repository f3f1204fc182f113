"""Micro-batches of any size, not only powers of two: equal ones, and the largest that memory allows."""

from hethub.planner.candidate.candidate import Candidate, ReplicaGroup, Where
from hethub.planner.estimate.estimator import Estimator
from hethub.planner.estimate.memory_model import places


def resized(candidate: Candidate, where: Where, estimator: Estimator, step: int) -> Candidate:
    """Return the candidate with the next larger (`step` 1) or smaller (-1) micro-batch in `where`, or (0) with the same
    number of microbatches made as equal as possible."""
    samples = estimator.samples(candidate)

    def size(index: int, own: ReplicaGroup) -> int:
        return _next_even(own, samples[index][candidate.stages[index].groups.index(own)], step, estimator)

    return candidate.with_sizes(where, size)


def _next_even(own: ReplicaGroup, samples: int, step: int, estimator: Estimator) -> int:
    """Return the micro-batch with which `samples` make fewer (`step` 1), more (-1) or equally many (0) microbatches, as equal
    as possible."""
    size, number = own.micro_batch, -(-samples // own.micro_batch)
    if step > 0:
        size = -(-samples // max(number - 1, 1))
    elif step < 0:
        size = max(1, min(size - 1, -(-samples // (number + 1))))
    problem, size = estimator.problem, even(samples, size)
    return problem.at_most(own.device_type, min(size, problem.constraints.max_micro_batch or size))


def even(samples: int, size: int) -> int:
    """Return the smallest micro-batch with which `samples` make as many microbatches as with `size`."""
    return -(-samples // -(-samples // size))


def fitted(candidate: Candidate, estimator: Estimator) -> Candidate | None:
    """Return the candidate with smaller micro-batches where replicas are over their memory: the largest that fits, made
    equal. Return None where even one sample is too much."""
    if estimator.problem.constraints.micro_batch:
        return None
    changed, held_by, taken_by = {}, estimator.of(candidate).holds, estimator.samples(candidate)
    each = zip(candidate.stages, places(len(candidate.stages)), held_by, taken_by, strict=True)
    for index, (stage, place, held, taken) in enumerate(each):
        sizes = []
        for own, samples in zip(stage.groups, taken, strict=True):
            most = estimator.times.largest(stage, own, place, candidate.pattern, held)
            if not most:
                return None
            sizes.append(most if most == own.micro_batch else even(samples, most))
        changed[index] = stage.with_sizes(sizes)
    return candidate.with_stages(changed)


def lessened(candidate: Candidate) -> Candidate:
    """Return the candidate with micro-batches a quarter smaller. Each loses at least one sample, but keeps one."""
    everywhere = [(index, None) for index in range(len(candidate.stages))]
    return candidate.with_sizes(everywhere, lambda _, own: max(1, 3 * own.micro_batch // 4))
