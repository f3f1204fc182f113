"""The learning-rate schedule."""

import math

from hethub.spec.job import TrainSpec


def learning_rate(train: TrainSpec, step: int) -> float:
    """The rate of `step` (counted from 1): linear warm-up to lr, then a cosine down to min_lr at the last step."""
    if step <= train.warmup_steps:
        return train.lr * step / train.warmup_steps
    progress = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    return train.min_lr + (train.lr - train.min_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
