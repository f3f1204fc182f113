"""Micro-batches of any size: microbatches that come out even, and the largest that memory allows."""

from collections.abc import Sequence

from hethub.planner.candidate.candidate import Draft, Seats
from hethub.planner.estimate.estimator import Surrogate
from hethub.planner.estimate.memory_model import position

Where = Sequence[tuple[int, int | None]]  # stages, each with one kind of its replicas or, None, all


def resized(draft: Draft, where: Where, surrogate: Surrogate, step: int) -> Draft:
    """The draft with microbatches of the next larger (`step` 1) or smaller (-1) even size in `where`, or (0) evened
    out."""
    changed = {}
    for index, kind in where:
        stage, samples = draft.stages[index], surrogate.samples(draft, index)
        sizes = [
            _next_even(own, taken, step, surrogate) if kind in (None, own.kind) else own.micro_batch
            for own, taken in zip(stage.seats, samples, strict=True)
        ]
        changed[index] = stage.with_sizes(sizes)
    return draft.with_stages(changed)


def _next_even(own: Seats, samples: int, step: int, surrogate: Surrogate) -> int:
    """The micro-batch with which `samples` make fewer, more or as many microbatches, as equal as they can be."""
    size, number = own.micro_batch, -(-samples // own.micro_batch)
    if step > 0:
        size = -(-samples // max(number - 1, 1))
    elif step < 0:
        size = max(1, min(size - 1, -(-samples // (number + 1))))
    return _allowed(own, even(samples, size), surrogate)


def even(samples: int, size: int) -> int:
    """The smallest micro-batch with which `samples` make as many microbatches as with `size`."""
    return -(-samples // -(-samples // size))


def _allowed(own: Seats, size: int, surrogate: Surrogate) -> int:
    given = surrogate.problem.constraints
    return surrogate.problem.at_most(own.kind, min(size, given.max_micro_batch or size))


def fitted(draft: Draft, surrogate: Surrogate) -> Draft | None:
    """The draft with the micro-batches of replicas over their memory cut to the largest that fits, microbatches
    evened; None where one sample is too much."""
    if surrogate.problem.constraints.micro_batch or not surrogate.problem.capabilities.any_micro_batch:
        return None
    last, holds, changed = len(draft.stages) - 1, surrogate.holds(draft), {}
    for index, (stage, held) in enumerate(zip(draft.stages, holds, strict=True)):
        place, sizes = position(index == 0, index == last), []
        for own, samples in zip(stage.seats, surrogate.samples(draft, index), strict=True):
            most = surrogate.largest(stage, own, place, draft.schedule, held)
            if not most:
                return None
            sizes.append(most if most == own.micro_batch else even(samples, most))
        changed[index] = stage.with_sizes(sizes)
    return draft.with_stages(changed)
