"""Micro-batches of any size: microbatches that come out even, and the largest that memory allows."""

from hethub.planner.candidate.candidate import Candidate, ReplicaGroup, Where
from hethub.planner.estimate.estimator import Estimator
from hethub.planner.estimate.memory_model import places


def resized(candidate: Candidate, where: Where, estimator: Estimator, step: int) -> Candidate:
    """The candidate with microbatches of the next larger (`step` 1) or smaller (-1) even size in `where`, or (0) evened
    out."""
    samples = estimator.samples(candidate)

    def size(index: int, own: ReplicaGroup) -> int:
        return _next_even(own, samples[index][candidate.stages[index].groups.index(own)], step, estimator)

    return candidate.with_sizes(where, size)


def _next_even(own: ReplicaGroup, samples: int, step: int, estimator: Estimator) -> int:
    """The micro-batch with which `samples` make fewer, more or as many microbatches, as equal as they can be."""
    size, number = own.micro_batch, -(-samples // own.micro_batch)
    if step > 0:
        size = -(-samples // max(number - 1, 1))
    elif step < 0:
        size = max(1, min(size - 1, -(-samples // (number + 1))))
    problem, size = estimator.problem, even(samples, size)
    return problem.at_most(own.device_type, min(size, problem.constraints.max_micro_batch or size))


def even(samples: int, size: int) -> int:
    """The smallest micro-batch with which `samples` make as many microbatches as with `size`."""
    return -(-samples // -(-samples // size))


def fitted(candidate: Candidate, estimator: Estimator) -> Candidate | None:
    """The candidate with the micro-batches of replicas over their memory cut to the largest that fits, microbatches
    evened; None where one sample is too much."""
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
    """The candidate with micro-batches a quarter smaller, by one sample at least where there are two."""
    everywhere = [(index, None) for index in range(len(candidate.stages))]
    return candidate.with_sizes(everywhere, lambda _, own: max(1, 3 * own.micro_batch // 4))
