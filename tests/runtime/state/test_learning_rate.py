"""The learning rate is torch's schedule, and defined at its edges."""

from typing import Any

import pytest
import torch

from hethub.runtime.state.learning_rate import learning_rate
from hethub.spec.job import TrainSpec

TRAIN = TrainSpec(steps=100, warmup_steps=10, lr=1e-2, min_lr=1e-3)


def test_the_rate_warms_up_then_falls_as_torchs_cosine() -> None:
    assert [learning_rate(TRAIN, step) for step in (1, 5, 10)] == pytest.approx([1e-3, 5e-3, 1e-2])
    weight = torch.nn.Parameter(torch.zeros(1))
    sgd = torch.optim.SGD([weight], lr=TRAIN.lr)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, T_max=90, eta_min=TRAIN.min_lr)
    for step in range(10, 101):
        assert learning_rate(TRAIN, step) == pytest.approx(cosine.get_last_lr()[0], rel=1e-9)
        sgd.step()
        cosine.step()
    assert learning_rate(TRAIN, 100) == pytest.approx(1e-3)
    assert learning_rate(TRAIN, 500) == pytest.approx(1e-3)  # a run that goes on stays at the floor


@pytest.mark.parametrize("changes", [{"warmup_steps": 0}, {"warmup_steps": 100}, {"warmup_steps": 200}, {"steps": 1}])
def test_the_rate_is_defined_at_the_edges(changes: dict[str, Any]) -> None:
    train = TRAIN.replace(**changes)
    rates = [learning_rate(train, step) for step in range(1, train.steps + 1)]
    assert all(0 < rate <= train.lr for rate in rates)
    if train.warmup_steps == 0 and train.steps > 1:
        assert rates[0] == pytest.approx(train.lr, rel=1e-3)
