"""What a microbatch's passes take, by what the seconds are spent on."""

from typing import NamedTuple


class Parts(NamedTuple):
    """Seconds of one pass of one microbatch by what they are spent on."""

    compute: float
    tp: float
    dp: float  # gathers and reductions inside the pass (ZeRO-2/3) that compute does not hide

    @property
    def total(self) -> float:
        return self.compute + self.tp + self.dp


class MicrobatchCost(NamedTuple):
    """Forward and backward of one microbatch on one replica; where weight gradients are put off, they are apart."""

    forward: Parts
    backward: Parts
    weight: Parts = Parts(0.0, 0.0, 0.0)
