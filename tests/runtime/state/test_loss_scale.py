"""The loss scale of fp16 finds the largest power of two that does not overflow."""

from hethub.runtime.state.loss_scale import LossScale


def test_loss_scale_halves_on_overflow_and_doubles_after_patience() -> None:
    scale = LossScale("fp16", initial=8.0, patience=3)
    seen = []
    for overflow in (True, False, False, True, False, False, False, False, True, True, True, True):
        scale.update(overflow=overflow)
        seen.append(scale.value)
    assert seen == [4, 4, 4, 2, 2, 2, 4, 4, 2, 1, 1, 1]  # never below 1
    plain = LossScale("bf16")
    plain.update(overflow=True)
    assert (plain.value, plain.dynamic) == (1.0, False)
