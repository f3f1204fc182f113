"""Actions: what a rank does, one entry of its schedule each."""

from enum import StrEnum
from typing import NamedTuple

from hethub.spec.schedule.microbatches import Tile


class Kind(StrEnum):
    """What a rank does; the names appear in traces, predicted and measured alike."""

    FORWARD = "forward"
    BACKWARD = "backward"  # under zero_bubble the gradients of the inputs only
    WEIGHT = "weight"  # zero_bubble: the gradients of the weights, from what the tile's backward has kept for them
    REDUCE = "reduce"  # gradients summed over replicas; overlapped with the last backward, waited for here
    STEP = "step"  # global norm, clipping, optimizer
    GATHER = "gather"  # new weights from their owners to all holders


class Pass(NamedTuple):
    """A lane's `index`-th tile in a part of its stage. A lane is a replica, or a stage that goes in rounds."""

    kind: Kind
    part: int
    index: int  # type: ignore[assignment]  # hides tuple.index


COMPUTE = (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT)
UPDATE = (Kind.REDUCE, Kind.STEP, Kind.GATHER)


class Action(NamedTuple):
    """One entry of a rank's schedule. Compute has a tile, but in a round that has none for this replica."""

    kind: Kind
    stage: int
    tile: Tile | None = None
    part: int = 0  # of the stage's parts (Layout.parts)
    num_parts: int = 1

    @property
    def is_compute(self) -> bool:
        return self.kind in COMPUTE

    @property
    def name(self) -> str:
        """`forward s0 [4, 6)`, with `c1` where a stage has several parts: equal in the prediction's and the run's trace."""
        place = f"{self.kind} s{self.stage}" + (f" c{self.part}" if self.num_parts > 1 else "")
        if self.tile is not None:
            return f"{place} [{self.tile.samples.start}, {self.tile.samples.stop})"
        return f"{place} without tile" if self.is_compute else place
