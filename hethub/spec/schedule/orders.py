"""The order of one actor's passes under each schedule. An actor is a replica, or a stage whose replicas go in
rounds."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

from hethub.spec.schedule.actions import UPDATE, Kind, Pass

NO_MICROBATCH = -1  # index of what is done once for all microbatches

Operation = tuple[Kind, int]  # what is done, and in which chunk of the stage


@dataclass(frozen=True, eq=False)
class ActorOrder:
    """What an actor does in a step, in order, as columns. All actors that do the same may share one."""

    computing: tuple[Operation, ...]
    updating: tuple[Operation, ...]
    operation_of: list[int]  # by position; those of `updating` count behind those of `computing`
    index_of: list[int]  # by position, which of the actor's microbatches

    @cached_property
    def passes(self) -> tuple[Pass, ...]:
        """The entries one by one."""
        operations = self.computing + self.updating
        return tuple(
            Pass(*operations[operation], index)
            for operation, index in zip(self.operation_of, self.index_of, strict=True)
        )

    @cached_property
    def positions(self) -> dict[Operation, list[int]]:
        """The positions of the actor's microbatches in the order, for each computing operation."""
        found = [[0] * self.operation_of.count(operation) for operation in range(len(self.computing))]
        for position, (operation, index) in enumerate(zip(self.operation_of, self.index_of, strict=True)):
            if index != NO_MICROBATCH:
                found[operation][index] = position
        return dict(zip(self.computing, found, strict=True))

    @cached_property
    def updates(self) -> dict[Operation, int]:
        """The position of each update."""
        first = len(self.computing)
        return {operation: self.operation_of.index(first + number) for number, operation in enumerate(self.updating)}

    @cached_property
    def turns(self) -> tuple[int, int]:
        """How many forwards are followed at once by a backward through the same chunk, and how many backwards by a forward. The
        weights of the layer between the two stay."""
        number, pairs = {own: at for at, own in enumerate(self.computing)}, Counter(pairwise(self.operation_of))
        chunks = {chunk for _, chunk in self.computing}
        both = [(number[Kind.FORWARD, chunk], number[Kind.BACKWARD, chunk]) for chunk in chunks]
        return sum(pairs[one, other] for one, other in both), sum(pairs[other, one] for one, other in both)

    @cached_property
    def spans(self) -> dict[Operation, tuple[int, int]]:
        """The first and last position of each computing operation."""
        return {operation: (min(own), max(own)) for operation, own in self.positions.items()}

    @cached_property
    def edges(self) -> list[int]:
        """The positions of updates, and of each operation's first and last entry, in order."""
        return sorted({*self.updates.values(), *(edge for span in self.spans.values() for edge in span)})


@lru_cache(maxsize=256)
def pipelined(num_microbatches: int, in_flight: int, deferred_wgrad: int | None) -> ActorOrder:
    """Return the order of 1F1B: `in_flight` forwards, then backwards and forwards in turn, then the remaining backwards. GPipe
    holds all microbatches.

    If `deferred_wgrad` is given, the weights' gradients of a backward come up to so many backwards later, and the rest of
    them at the end. They only wait for their own backward, so an order that can run without them can run with them.
    """
    computing = ((Kind.FORWARD, 0), (Kind.BACKWARD, 0)) + (((Kind.WEIGHT, 0),) if deferred_wgrad is not None else ())
    operation_of, index_of = [0] * min(in_flight, num_microbatches), list(range(min(in_flight, num_microbatches)))
    for index in range(num_microbatches):
        operation_of.append(1)
        index_of.append(index)
        if deferred_wgrad is not None and index >= deferred_wgrad:
            operation_of.append(2)
            index_of.append(index - deferred_wgrad)
        if index + in_flight < num_microbatches:
            operation_of.append(0)
            index_of.append(index + in_flight)
    if deferred_wgrad is not None:
        left = range(max(0, num_microbatches - deferred_wgrad), num_microbatches)
        operation_of += [2] * len(left)
        index_of += left
    return updated_once(computing, operation_of, index_of)


def updated_once(computing: tuple[Operation, ...], operation_of: list[int], index_of: list[int]) -> ActorOrder:
    """Return the order with one update of all chunks at its end. Both lists are changed."""
    operation_of += range(len(computing), len(computing) + len(UPDATE))
    index_of += [NO_MICROBATCH] * len(UPDATE)
    return ActorOrder(computing, tuple((kind, 0) for kind in UPDATE), operation_of, index_of)


@lru_cache(maxsize=256)
def chunk_by_chunk(num_microbatches: int, num_chunks: int, steps_chunk_by_chunk: bool) -> ActorOrder:
    """Return the order of ministages and layered: all microbatches pass a chunk before the next one, forward and then backward.
    Under ministages each chunk is stepped after its backward; under layered a chunk is a layer."""
    chunks = [*range(num_chunks), *reversed(range(num_chunks))]
    kinds = [Kind.FORWARD] * num_chunks + [Kind.BACKWARD] * num_chunks
    computing = tuple(zip(kinds, chunks, strict=True))
    microbatches = list(range(num_microbatches))
    if not steps_chunk_by_chunk:
        operation_of = [operation for operation in range(2 * num_chunks) for _ in microbatches]
        return updated_once(computing, operation_of, microbatches * (2 * num_chunks))
    updating = tuple((kind, chunk) for chunk in chunks[num_chunks:] for kind in UPDATE)
    operation_of = [operation for operation in range(num_chunks) for _ in microbatches]
    index_of = microbatches * num_chunks
    for turn in range(num_chunks):
        operation_of += [num_chunks + turn] * num_microbatches
        operation_of += range(2 * num_chunks + turn * len(UPDATE), 2 * num_chunks + (turn + 1) * len(UPDATE))
        index_of += microbatches + [NO_MICROBATCH] * len(UPDATE)
    return ActorOrder(computing, updating, operation_of, index_of)


def listed(operations: Sequence[Operation], indices: list[int]) -> ActorOrder:
    """Return the order of the passes given, each by its operation and the actor's microbatch, with one update at the end."""
    numbers: dict[Operation, int] = {}
    operation_of = [numbers.setdefault(operation, len(numbers)) for operation in operations]
    return updated_once(tuple(numbers), operation_of, indices)
