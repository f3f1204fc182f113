"""The learning-rate schedule, and how a resumed run goes on with it."""

import math

from hethub.spec.base import Spec
from hethub.spec.job import ScheduleKind, TrainSpec
from hethub.spec.model import Count

WSD_DECAY = 0.1  # of all steps, where the job does not say: MiniCPM's (Hu et al. 2024)


def learning_rate(train: TrainSpec, step: int, end: int | None = None) -> float:
    """The rate of `step` (counted from 1): linear warm-up to lr, then the job's schedule down to min_lr, where it stays.

    `cosine` and `linear` fall from the warm-up on, over `decay_steps`, without it until the step `end` (None: the job's
    last); `wsd` falls in a line over the last `decay_steps` before `end` (a tenth); `constant` does not fall.
    """
    if step <= train.warmup_steps:
        return train.lr * step / train.warmup_steps
    first, last = _decay(train, train.steps if end is None else end)
    if train.schedule == "constant" or step <= first:
        return train.lr
    progress = min(1.0, (step - first) / max(1, last - first))
    left = 0.5 * (1 + math.cos(math.pi * progress)) if train.schedule == "cosine" else 1.0 - progress
    return train.min_lr + (train.lr - train.min_lr) * left


def _decay(train: TrainSpec, end: int) -> tuple[int, int]:
    """The step behind which the rate begins to fall, and the one at which it has reached min_lr."""
    if train.schedule == "wsd":
        steps = train.decay_steps or max(1, round(WSD_DECAY * end))
        return max(train.warmup_steps, end - steps), end
    return train.warmup_steps, end if train.decay_steps is None else train.warmup_steps + train.decay_steps


class ScheduleState(Spec):
    """The schedule that a checkpoint was trained with."""

    kind: ScheduleKind
    decay_steps: Count | None = None
    end: Count


class Schedule:
    """The learning rate of a run, which keeps the end it began with."""

    def __init__(self, train: TrainSpec) -> None:
        self._train, self._end = train, train.steps

    def rate(self, step: int) -> float:
        return learning_rate(self._train, step, self._end)

    @property
    def state(self) -> ScheduleState:
        return ScheduleState(kind=self._train.schedule, decay_steps=self._train.decay_steps, end=self._end)

    def resume(self, saved: ScheduleState, step: int) -> None:
        """Goes on behind `step` as the run began: another train.steps alone must not lift the rate.

        Another schedule or decay_steps is asked for, and begins anew; `wsd` that has not begun to fall falls before the
        new end, and so does what was to end in its warm-up.
        """
        train = self._train
        if (saved.kind, saved.decay_steps) != (train.schedule, train.decay_steps):
            return
        was_to_fall = train.schedule != "wsd" and saved.end > train.warmup_steps
        if was_to_fall or step > _decay(train, saved.end)[0]:
            self._end = saved.end

    @property
    def notes(self) -> list[str]:
        """What to say of a warm-up that does not end, and of an end that is not the job's."""
        train = self._train
        if train.warmup_steps >= train.steps:
            return [
                f"train.warmup_steps {train.warmup_steps} last until the end: the learning rate rises to {self.rate(train.steps):g} at the "
                f"last step, {train.steps}, and does not fall; train.lr is {train.lr:g}"
            ]
        fixed = train.schedule == "constant" or (train.schedule != "wsd" and train.decay_steps is not None)
        if fixed or self._end == train.steps:
            return []
        return [
            f"the learning rate falls to min_lr at step {self._end}, where the run was to end when it began; to have it fall until "
            f"train.steps {train.steps}, give another train.decay_steps, with --accept-changes"
        ]
