"""Dynamic loss scaling, without which small gradients of fp16 would be zeros."""


def initial_scale(tokens: int) -> float:
    """Return the loss scale for steps of `tokens` tokens. A token's loss enters the backward 8 to 16 times as large, whatever
    their number. That is what the usual 2^16 makes of the mean over 4,096 tokens. Small steps are scaled by all of 2^16."""
    return 2.0 ** max(16, tokens.bit_length() + 3)


class LossScale:
    """Dynamic loss scaling for fp16: halved after an overflow, doubled after `patience` good steps; 1 elsewhere."""

    def __init__(self, precision: str, *, initial: float = 2.0**16, patience: int = 1000) -> None:
        self.dynamic = precision == "fp16"
        self.value = initial if self.dynamic else 1.0
        self.good_steps, self._patience = 0, patience

    @property
    def is_lowest(self) -> bool:
        """Whether an overflow cannot be the scale's fault; always so where there is no scaling."""
        return self.value == 1.0

    def update(self, *, overflow: bool) -> None:
        """Every rank calls it with the same finding, so all keep the same scale."""
        if not self.dynamic:
            return
        self.good_steps = 0 if overflow else self.good_steps + 1
        if overflow:
            self.value = max(1.0, self.value / 2)
        elif self.good_steps == self._patience:
            self.value, self.good_steps = self.value * 2, 0
