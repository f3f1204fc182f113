"""The learning rate is torch's schedule, defined at its edges, and not lifted by a run that grows longer."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hethub.runtime.state.learning_rate import Schedule, learning_rate
from hethub.spec.errors import BadInput
from hethub.spec.job import TrainSpec, load_job
from tests.support.job_files import write_job

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


def followed(train: TrainSpec, theirs: Any, first: int, last: int) -> None:
    """Whether our rate is that of torch's scheduler, which starts at step `first`."""
    for step in range(first, last + 1):
        assert learning_rate(train, step) == pytest.approx(theirs.get_last_lr()[0], rel=1e-9), step
        theirs.optimizer.step()
        theirs.step()


def scheduler(kind: str, **more: Any) -> Any:
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=TRAIN.lr)
    return getattr(torch.optim.lr_scheduler, kind)(sgd, **more)


@pytest.mark.parametrize("changes", [{"schedule": "wsd", "decay_steps": 1}, {"warmup_steps": 99}])
def test_a_fall_of_one_step_is_over_with_it(changes: dict[str, Any]) -> None:
    train = TRAIN.replace(**changes)
    assert [learning_rate(train, step) for step in (99, 100)] == [TRAIN.lr, TRAIN.min_lr]


def test_every_schedule_is_torchs() -> None:
    floor = TRAIN.min_lr / TRAIN.lr
    linear = scheduler("LinearLR", start_factor=1.0, end_factor=floor, total_iters=90)
    followed(TRAIN.replace(schedule="linear"), linear, 10, 120)
    short = scheduler("CosineAnnealingLR", T_max=40, eta_min=TRAIN.min_lr)
    followed(TRAIN.replace(decay_steps=40), short, 10, 50)
    falls = scheduler("LinearLR", start_factor=1.0, end_factor=floor, total_iters=25)
    wsd = TRAIN.replace(schedule="wsd", decay_steps=25)
    assert {learning_rate(wsd, step) for step in range(10, 76)} == {TRAIN.lr}
    followed(wsd, falls, 75, 120)
    assert (
        learning_rate(TRAIN.replace(schedule="wsd"), 90) == TRAIN.lr > learning_rate(TRAIN.replace(schedule="wsd"), 91)
    )
    assert {learning_rate(TRAIN.replace(schedule="constant"), step) for step in range(10, 200)} == {TRAIN.lr}


def resumed(train: TrainSpec, step: int, **changes: Any) -> Schedule:
    """The schedule of a run that is resumed behind `step` under a changed job."""
    schedule = Schedule(train.replace(**changes))
    schedule.resume(Schedule(train).state, step)
    return schedule


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd", "constant"])
@pytest.mark.parametrize("step", [5, 10, 60, 95, 100])
def test_more_steps_alone_never_lift_the_rate(kind: str, step: int) -> None:
    train = TRAIN.replace(schedule=kind)
    longer = resumed(train, step, steps=400)
    reached = train.lr if step <= train.warmup_steps else learning_rate(train, step)
    assert all(longer.rate(later) <= reached for later in range(step + 1, 401))
    assert longer.rate(step) == learning_rate(train, step)
    # A second resume does not lift it either.
    again = Schedule(train.replace(steps=800))
    again.resume(longer.state, 300)
    assert again.rate(301) <= longer.rate(300)


def test_a_fall_that_has_not_begun_begins_before_the_new_end() -> None:
    longer = resumed(TRAIN.replace(schedule="wsd"), 60, steps=400)
    assert longer.rate(360) == TRAIN.lr > longer.rate(361)
    assert longer.notes == []
    # Of 100 steps the 91st is the first that is lower: behind the 90th the fall has not begun, behind the 91st it has.
    assert resumed(TRAIN.replace(schedule="wsd"), 90, steps=400).rate(360) == TRAIN.lr
    assert resumed(TRAIN.replace(schedule="wsd"), 91, steps=400).rate(100) == TRAIN.min_lr


@pytest.mark.parametrize("steps", [5, TRAIN.warmup_steps])
@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
def test_a_run_that_was_to_end_in_its_warm_up_falls_before_the_new_end(kind: str, steps: int) -> None:
    """A few steps tried first, then the whole run: behind the warm-up the rate fell to min_lr in one step."""
    longer = resumed(TRAIN.replace(schedule=kind, steps=steps), steps, steps=100)
    assert [longer.rate(step) for step in range(steps + 1, 101)] == [
        learning_rate(TRAIN.replace(schedule=kind), step) for step in range(steps + 1, 101)
    ]
    assert longer.notes == []


def test_a_fall_that_is_over_stays_so_whatever_the_warm_up_was() -> None:
    fallen = Schedule(TRAIN)
    fallen.resume(Schedule(TRAIN.replace(steps=5)).state, 50)  # as an earlier hethub went on
    assert fallen.rate(51) == TRAIN.min_lr


@pytest.mark.parametrize(("warmup", "reached"), [(100, "0.01"), (200, "0.005")])
def test_a_warm_up_that_lasts_until_the_end_is_told(warmup: int, reached: str) -> None:
    (note,) = Schedule(TRAIN.replace(warmup_steps=warmup)).notes
    assert f"train.warmup_steps {warmup}" in note
    assert f"rises to {reached} at the last step, 100" in note
    assert Schedule(TRAIN.replace(warmup_steps=99)).notes == []


def test_who_asks_gets_another_schedule() -> None:
    assert resumed(TRAIN, 100, steps=400, decay_steps=390).rate(101) == pytest.approx(
        learning_rate(TRAIN.replace(steps=400), 101)
    )
    (note,) = resumed(TRAIN, 100, steps=400).notes
    assert "step 100" in note
    assert "another train.decay_steps, with --accept-changes" in note  # without it the change is refused


@pytest.mark.parametrize(
    ("changes", "tells"),
    [
        ({"schedule": "constant"}, False),
        ({"decay_steps": 50}, False),
        ({"schedule": "linear", "decay_steps": 50}, False),
        ({"schedule": "wsd", "decay_steps": 50}, True),
    ],
)
def test_only_a_fall_that_the_end_decides_is_told_of(changes: dict[str, Any], tells: bool) -> None:
    """A cosine of 50 steps ends where it ends, however long the run; wsd's 50 steps lie before the end it began with."""
    assert bool(resumed(TRAIN.replace(**changes), 60, steps=400).notes) == tells


def test_the_schedule_may_be_a_mapping(tmp_path: Path) -> None:
    train = load_job(write_job(tmp_path, train={"schedule": {"kind": "wsd", "decay_steps": 3}})).spec.train
    assert (train.schedule, train.decay_steps) == ("wsd", 3)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"schedule": "cosin"}, "train.schedule"),
        ({"schedule": {"decay_steps": 3}}, "`kind`"),
        ({"schedule": {"kind": "wsd", "decay_steps": 3}, "decay_steps": 4}, "nowhere else"),
        ({"schedule": "constant", "decay_steps": 4}, "constant has none"),
        ({"decay_steps": 0}, "train.decay_steps"),
    ],
)
def test_a_schedule_that_is_none_is_refused(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        load_job(write_job(tmp_path, train=given))
