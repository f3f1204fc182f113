"""Actions: what a rank does, one entry of its schedule each."""

from enum import StrEnum
from typing import NamedTuple

from hethub.spec.schedule.microbatches import MicrobatchRange


class Kind(StrEnum):
    """What a rank does; the names appear in traces, predicted and measured alike."""

    FORWARD = "forward"
    BACKWARD = "backward"  # under zero_bubble the gradients of the inputs only
    # zero_bubble: the gradients of the weights, from what the microbatch's backward has kept for them
    WEIGHT = "weight"
    REDUCE = "reduce"  # gradients summed over replicas; overlapped with the last backward, waited for here
    STEP = "step"  # global norm, clipping, optimizer
    GATHER = "gather"  # new weights from their owners to all holders


class Pass(NamedTuple):
    """An actor's `index`-th microbatch in a chunk of its stage. An actor is a replica, or a stage that goes in
    rounds."""

    kind: Kind
    chunk: int
    index: int  # type: ignore[assignment]  # hides tuple.index


COMPUTE = (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT)
UPDATE = (Kind.REDUCE, Kind.STEP, Kind.GATHER)
COLLECTIVE = (Kind.REDUCE, Kind.GATHER)  # waited for by compute, which they go on beside


class Action(NamedTuple):
    """One entry of a rank's schedule. Compute has a microbatch, but in a round that has none for this replica."""

    kind: Kind
    stage: int
    microbatch: MicrobatchRange | None = None
    chunk: int = 0  # of the stage's chunks (Layout.chunks)
    num_chunks: int = 1

    @property
    def is_compute(self) -> bool:
        return self.kind in COMPUTE

    @property
    def name(self) -> str:
        """`forward s0 [4, 6)`, with `c1` where a stage has several chunks: equal in the prediction's and the run's
        trace."""
        kind, stage, microbatch, chunk, num_chunks = self
        part = f" c{chunk}" if num_chunks > 1 else ""
        if microbatch is None:
            return f"{kind} s{stage}{part}" + (" without microbatch" if self.is_compute else "")
        start, stop = microbatch.samples
        return f"{kind} s{stage}{part} [{start}, {stop})"
