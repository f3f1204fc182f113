"""How a run is asked to stop, and what it does then."""

import os
import signal
from types import SimpleNamespace

import pytest
import torch

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
    """A run of 8 steps, evaluated and saved every other step, that is asked to stop in step `asked`; what it `did`."""

    def __init__(self, job, folder, asked):
        data = SimpleNamespace(held_out=object(), epochs=lambda train, done: ([], []))
        super().__init__(SimpleNamespace(rank=1, size=2), job, data, SimpleNamespace(path=folder), 0)
        self.did = []
        self.trainer = SimpleNamespace(
            run_step=lambda step, **more: StepOutcome(1.0, 1.0, 0, step == asked, False, ()), flush=lambda: None,
            evaluate=lambda held_out, batches: self.did.append("evaluated") or 1.0, schedule=SimpleNamespace(notes=[]),
        )  # fmt: skip

    def _told(self):
        return []

    def _save(self, step, *, ends):
        self.did.append(f"saved {step}")
        return ""


EVERY_OTHER = ["evaluated", "saved 2", "evaluated", "saved 4", "evaluated", "saved 6", "evaluated", "saved 8"]


@pytest.mark.parametrize(("asked", "did"), [(4, ["evaluated", "saved 2", "saved 4"]), (8, EVERY_OTHER)])
def test_a_run_that_is_asked_to_stop_saves_before_all_else(tmp_path, monkeypatch, asked, did):
    """The launcher gives it a time, and an evaluation or a trace may take all of it. In the last step the wish changes
    nothing."""
    changes = ["eval={every_steps: 2, batches: 1, data: {source: python-stdlib}}", "log={profile_steps: [2, 100]}"]
    job = load_job(write_job(tmp_path / "job", train={"steps": 8}, checkpoint={"every_steps": 2}), changes)
    loop = Stopping(job, tmp_path, asked)
    traced = SimpleNamespace(
        start=lambda: None, stop=lambda: None, export_chrome_trace=lambda path: loop.did.append(path)
    )
    monkeypatch.setattr(torch.profiler, "profile", lambda **more: traced)
    assert loop._train([], []) == (asked, asked < 8)
    assert loop.did == [*did, str(tmp_path / "profile" / "rank-1.json")]
