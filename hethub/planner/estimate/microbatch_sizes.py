"""Micro-batches of any size: microbatches that come out even, and the largest that memory allows."""

from collections.abc import Sequence

from hethub.planner.candidate.candidate import Candidate, ReplicaGroup
from hethub.planner.estimate.estimator import Estimator
from hethub.planner.estimate.memory_model import position

Where = Sequence[tuple[int, int | None]]  # stages, each with one device type of its replicas or, None, all


def resized(candidate: Candidate, where: Where, estimator: Estimator, step: int) -> Candidate:
    """The candidate with microbatches of the next larger (`step` 1) or smaller (-1) even size in `where`, or (0) evened
    out."""
    changed, samples = {}, estimator.samples(candidate)
    for index, device_type in where:
        stage = candidate.stages[index]
        sizes = [
            _next_even(own, taken, step, estimator) if device_type in (None, own.device_type) else own.micro_batch
            for own, taken in zip(stage.groups, samples[index], strict=True)
        ]
        changed[index] = stage.with_sizes(sizes)
    return candidate.with_stages(changed)


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
    last, changed = len(candidate.stages) - 1, {}
    each = zip(candidate.stages, estimator.of(candidate).holds, estimator.samples(candidate), strict=True)
    for index, (stage, held, taken) in enumerate(each):
        place, sizes = position(index == 0, index == last), []
        for own, samples in zip(stage.groups, taken, strict=True):
            most = estimator.times.largest(stage, own, place, candidate.pattern, held)
            if not most:
                return None
            sizes.append(most if most == own.micro_batch else even(samples, most))
        changed[index] = stage.with_sizes(sizes)
    return candidate.with_stages(changed)


def lessened(candidate: Candidate) -> Candidate:
    """The candidate with micro-batches a quarter smaller, by one sample at least where there are two."""
    changed = {
        index: stage.with_sizes([max(1, 3 * own.micro_batch // 4) for own in stage.groups])
        for index, stage in enumerate(candidate.stages)
    }
    return candidate.with_stages(changed)
