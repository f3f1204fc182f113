"""How a run is asked to stop, and what it does then."""

import os
import signal
from types import SimpleNamespace

import pytest

from hethub.runtime.loop.step_report import StepOutcome
from hethub.runtime.loop.steps import StepLoop
from hethub.runtime.loop.stop_signal import StopSignal
from hethub.spec.job import load_job
from tests.support.job_files import write_job


def test_a_signal_is_remembered_and_given_back_but_for_the_one_that_only_asks_to_save():
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)}
    with StopSignal() as stop:
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.requested
    behind = {number: signal.getsignal(number) for number in before}
    signal.signal(signal.SIGUSR1, before[signal.SIGUSR1])
    assert behind == before | {signal.SIGUSR1: signal.SIG_IGN}


def test_whoever_asks_to_stop_is_answered_once(capfd):
    before = signal.getsignal(signal.SIGUSR1)
    with StopSignal(speaks=True):
        for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGINT):
            os.kill(os.getpid(), number)
    signal.signal(signal.SIGUSR1, before)
    assert capfd.readouterr().err.count("stopping behind this step") == 1


class Stopping(StepLoop):
    """A run that is asked to stop in step 4 of 8, evaluated every other step and behind the last."""

    def __init__(self, job, said):
        super().__init__(SimpleNamespace(rank=1), job, SimpleNamespace(held_out=object()), None, 0)
        self.said, self.last = said, 8
        self._profiler = SimpleNamespace(before=lambda step: None, behind=lambda step, **more: None)
        outcomes = {step: StepOutcome(1.0, 1.0, 0, step in (4, 8), False, ()) for step in range(1, 9)}
        self.trainer = SimpleNamespace(
            run_step=lambda step, **more: outcomes[step], flush=lambda: None,
            evaluate=lambda held_out, batches: self.said.append("evaluated") or 1.0,
        )  # fmt: skip

    def _say(self, text):
        """To nobody."""

    def _save(self, step, *, ends):
        self.said.append(f"saved {step}, {ends}")
        return ""


@pytest.mark.parametrize(
    ("step", "said"),
    [(2, ["evaluated", "saved 2, False"]), (4, ["saved 4, True"]), (8, ["evaluated", "saved 8, True"])],
)
def test_a_run_that_is_asked_to_stop_saves_and_does_not_evaluate_first(tmp_path, step, said):
    """The launcher gives it a time, and an evaluation may take all of it. In the last step the wish changes nothing."""
    path = write_job(tmp_path / "job")
    evaluated = load_job(path, ["eval={every_steps: 2, batches: 1, data: {source: python-stdlib}}"])
    loop = Stopping(evaluated, [])
    assert loop._step(step, SimpleNamespace(requested=False)) == (step != 2)
    assert loop.said == said
