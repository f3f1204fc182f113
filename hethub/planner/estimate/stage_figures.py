"""What is known of stages by themselves, side by side: arrays are [stage] or [stage, sort].

Where a stage has fewer sorts of replicas than others, nobody is of the rest.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hethub.planner.candidate.candidate import CandidateStage, Pattern
from hethub.planner.estimate.memory_model import ENDS


class Placed(NamedTuple):
    """A stage where it stands: what of the model's ends it holds (`memory_model.places`), whether its samples come in
    equal parts, whatever the speeds, and under which schedule."""

    stage: CandidateStage
    place: int
    even: bool
    pattern: Pattern

    @property
    def ends(self) -> tuple[bool, bool]:
        """Whether it holds the embedding and the head."""
        return ENDS[self.place]


class StageEstimate(NamedTuple):
    """Stages by themselves, in arrays of one shape: seconds of the busiest replica, of one microbatch each way, of the
    reduction and what follows it."""

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
        """Seconds of one microbatch both ways."""
        return self.forward + self.backward


class Division(NamedTuple):
    """How stages divide the samples: seconds of the busiest replica on its microbatches alone [stage], and [stage,
    sort] samples of a replica and seconds of each in whole microbatches."""

    least: np.ndarray
    taken: np.ndarray
    per_sample: np.ndarray


class Room(NamedTuple):
    """Bytes of ranks that microbatches may fill, and what a microbatch held fills, and one whose weights' gradients
    are put off."""

    free: Any
    microbatch: Any
    deferred_wgrad: Any


class Sort(NamedTuple):
    """One of the replicas of a stage: seconds of a whole microbatch each way, by layer and for what embedding and head
    add."""

    forward: Any
    backward: Any
    embedding_forward: Any
    embedding_backward: Any
    head_forward: Any
    head_backward: Any


class Side(NamedTuple):
    """Stages side by side: their layers, replicas and ZeRO levels [stage], and [stage, sort] the device type (nobody's is
    -1) and degree of a sort, how many replicas are of it, over how many ranks of its degree training state is cut, how
    large their microbatches are, and seconds of these each way."""

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
    """What stages sum over their replicas, [stage]: parameters, and seconds of a sum of any bytes, and of each."""

    parameters: np.ndarray
    latency: np.ndarray
    per_byte: np.ndarray

    def seconds(self, width: int, layers: np.ndarray | float = 1.0) -> np.ndarray:
        """Seconds to reduce or to gather `width` bytes of every parameter, in so many pieces."""
        return self.latency * layers + self.per_byte * self.parameters * width
