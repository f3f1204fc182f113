"""What is known of each stage by itself. Arrays are [stage] or [stage, sort], a sort being like replicas of a stage.

A stage with fewer sorts than others is filled up with sorts of which there are no replicas.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hethub.planner.candidate.candidate import CandidateStage, Pattern
from hethub.planner.estimate.memory_model import ENDS


class Placed(NamedTuple):
    """A stage in its place: which of the model's ends it holds (`memory_model.places`), whether its replicas take equally
    many samples even if their speeds differ, and the schedule."""

    stage: CandidateStage
    place: int
    even: bool
    pattern: Pattern

    @property
    def ends(self) -> tuple[bool, bool]:
        """Whether it holds the embedding, and whether it holds the head."""
        return ENDS[self.place]


class StageEstimate(NamedTuple):
    """Each stage by itself, in arrays of one shape. Times are in seconds: of the busiest replica, of one microbatch, of the
    reduction and of what follows it."""

    busy: np.ndarray
    forward: np.ndarray
    backward: np.ndarray  # what the microbatch above waits for
    covered: np.ndarray  # from when the last replica begins its last backward until the stage is through
    microbatches: np.ndarray  # of the busiest replica
    microstep: np.ndarray  # samples of one microbatch on every replica
    reduce: np.ndarray
    tail: np.ndarray
    finish: np.ndarray  # optimizer and new weights
    most: np.ndarray  # microbatches that every rank has memory for, or nearly so
    sure: np.ndarray  # microbatches that every rank has memory for
    host: np.ndarray  # what the ranks offload of state, in their parts of their hosts' memory
    host_microbatch: np.ndarray  # the same of every microbatch held

    @property
    def microbatch(self) -> np.ndarray:
        """Seconds of one microbatch, forward and backward."""
        return self.forward + self.backward


class Division(NamedTuple):
    """How stages divide the samples. `least` [stage]: the seconds for which the busiest replica computes. `taken` [stage,
    sort]: the samples of one replica. `per_sample` [stage, sort]: the seconds of one sample in whole microbatches."""

    least: np.ndarray
    taken: np.ndarray
    per_sample: np.ndarray


class Room(NamedTuple):
    """Memory of ranks in bytes: what is free for microbatches, what one microbatch in flight fills, and what one fills whose
    weights' gradients are put off."""

    free: Any
    microbatch: Any
    deferred_wgrad: Any


class Sort(NamedTuple):
    """Seconds of one microbatch on one replica, forward and backward: of a layer, and what embedding and head add."""

    forward: Any
    backward: Any
    embedding_forward: Any
    embedding_backward: Any
    head_forward: Any
    head_backward: Any


class Side(NamedTuple):
    """Stages as arrays: layers, replicas and ZeRO levels are [stage], the rest [stage, sort]. `device_types` is -1 where
    there is no replica, `numbers` how many replicas are of the sort, `shards` into how many parts training state is cut,
    `forward` and `backward` the seconds of one microbatch."""

    stages: Sequence[Placed]
    layers: np.ndarray
    replicas: np.ndarray
    zero: np.ndarray
    device_types: np.ndarray
    tp: np.ndarray
    numbers: np.ndarray
    shards: np.ndarray
    micro_batches: np.ndarray
    forward: np.ndarray
    backward: np.ndarray


class Sums(NamedTuple):
    """What stages sum over their replicas, [stage]: the number of parameters, and the latency of a sum and its seconds per
    byte."""

    parameters: np.ndarray
    latency: np.ndarray
    per_byte: np.ndarray

    def seconds(self, width: int, layers: np.ndarray | float = 1.0) -> np.ndarray:
        """Return the seconds to reduce or gather `width` bytes of every parameter, one layer after another."""
        return self.latency * layers + self.per_byte * self.parameters * width
