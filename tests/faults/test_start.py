"""A rank that never comes, dies or stops while the job starts: every other one says which, within the timeout."""

import importlib
import os
import runpy
import signal
import time
from functools import partial
from operator import attrgetter
from pathlib import Path

import pytest

from tests.support.command import check_refused, needs_mpirun, ranks, start_mpirun, start_torchrun
from tests.support.job_files import write_job

PHASES = runpy.run_path(str(Path(__file__).resolve().parents[2] / "benchmarks" / "struck_rank.py"))["PHASES"]
TIMEOUT_SECONDS = 10  # of which nothing is heard of a rank that has stopped for a half, or that has not joined for all
KILLED_SECONDS = 60  # who is killed behind that is missed at once, however long the others take
SAID = {signal.SIGKILL: "is gone", signal.SIGSTOP: "has stopped"}


def fail_at(moment, victim, how, rank):
    """The victim sends itself a signal as soon as it gets there."""
    if rank != victim:
        return
    from hethub.communicator import setup, torch_private
    from hethub.runtime.launch import rendezvous
    from hethub.runtime.loop import build, plan, read, train

    def end(*_, **__):
        os.kill(os.getpid(), how)

    places = {
        "knowing the store": (rendezvous, "watch_over"),
        "reading the data": (read, "open_dataset"),
        "agreeing": (train, "agree"),
        "planning": (plan, "profile_for"),
        "having planned": (train, "connect_ranks"),
        "telling its facts": (setup, "exchange_facts"),
        "connecting": (torch_private, "create_gloo_group"),
        "building": (build, "make_trainer"),
        "restoring": (train, "restore"),
    }
    module, name = places[moment]
    setattr(module, name, end)


def start_and_fail(tmp_path, moment, victim, how):
    """How the others ended."""
    is_missed = how == signal.SIGKILL and moment != "knowing the store"
    seconds = KILLED_SECONDS if is_missed else TIMEOUT_SECONDS
    job = write_job(tmp_path / "job", communicator={"timeout_seconds": seconds})
    hook = partial(fail_at, moment, victim, how)
    results = ranks(4, "train", job, "--run-dir", tmp_path / "run", cwd=tmp_path, hook=hook)
    return [ended for rank, ended in enumerate(results) if rank != victim]


def names(ended, victim, how):
    """Whether a rank ended because of the victim, and said so in one paragraph: a rank that never joined is missing,
    whatever has become of it; rank 0 may be gone before its store was reached."""
    words = (SAID[how], "has not come", "has not answered", "could not reach")
    return (
        ended.exit_code == 1
        and "Traceback" not in ended.stderr
        and len(ended.paragraphs) == 1
        and f"rank {victim}" in ended.paragraphs[0]
        and any(word in ended.paragraphs[0] for word in words)
    )


@pytest.mark.parametrize(("moment", "victim", "how"), [
    ("planning", 2, signal.SIGKILL), ("having planned", 0, signal.SIGSTOP),
])  # fmt: skip
def test_a_rank_lost_at_the_start_is_named(tmp_path, moment, victim, how):
    survivors = start_and_fail(tmp_path, moment, victim, how)
    assert [names(ended, victim, how) for ended in survivors] == [True] * 3, survivors


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("moment", [
    "knowing the store", "reading the data", "agreeing", "planning", "having planned", "telling its facts",
    "connecting", "building", "restoring",
])  # fmt: skip
def test_a_rank_lost_at_any_moment_of_the_start_is_named(tmp_path, moment, victim, how):
    survivors = start_and_fail(tmp_path, moment, victim, how)
    assert [names(ended, victim, how) for ended in survivors] == [True] * 3, survivors


@pytest.mark.parametrize("absurd", ["1e30", "0", "-1", ".nan", ".inf", "0.01", "[]"])
def test_absurd_timeouts_are_refused(tmp_path, absurd):
    job = write_job(tmp_path / "job")
    timeout = f"communicator.timeout_seconds={absurd}"
    (ended,) = ranks(1, "train", job, "--set", timeout, "--run-dir", tmp_path / "run", cwd=tmp_path)
    check_refused([ended], "communicator.timeout_seconds")
    assert not (tmp_path / "run").exists()


@needs_mpirun
@pytest.mark.slow
def test_a_rank_that_is_another_program_is_named_with_its_command(tmp_path):
    job = write_job(tmp_path / "job", communicator={"timeout_seconds": 10})
    more = ["--run-dir", tmp_path / "run", ":", "-n", "1", "/bin/false"]
    ended = start_mpirun(3, "train", job, *more, cwd=tmp_path).end()
    assert ended.exit_code == 1
    assert len(ended.paragraphs) == 3
    for paragraph in ended.paragraphs:
        assert f'rank 3 (on {os.uname().nodename}, as "-n 1 /bin/false") has not come' in paragraph


@needs_mpirun
@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("seconds", [0.5, 1.5, 2.5, 3.5, 5.0])
def test_under_mpirun_at_any_time(tmp_path, seconds, how, victim):
    job = write_job(tmp_path / "job", train={"steps": 5000}, communicator={"timeout_seconds": 20})
    running = start_mpirun(4, "train", job, "--run-dir", tmp_path / "run", cwd=tmp_path)
    running.wait_until(lambda: all(running.rank_pids(rank) for rank in range(4)))
    time.sleep(seconds)
    os.kill(running.rank_pid(victim), how)
    ended = running.end()
    assert ended.exit_code != 0
    assert len(ended.paragraphs) == 3, ended.stderr
    assert all(f"rank {victim}" in paragraph for paragraph in ended.paragraphs), ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("file", ["owner.json", "plan.yaml", "metrics.jsonl"])  # planning, building, training
def test_under_torchrun_once_the_ranks_have_met(tmp_path, file, how):
    """torchrun itself ends the others, with SIGTERM: they say what they know."""
    job = write_job(tmp_path / "job", train={"steps": 5000}, communicator={"timeout_seconds": 20})
    running = start_torchrun(4, "train", job, "--run-dir", tmp_path / "run", cwd=tmp_path)
    running.wait_until((tmp_path / "run" / file).exists)
    os.kill(running.rank_pid(2), how)
    ended = running.end()
    assert ended.exit_code != 0
    assert len(ended.paragraphs) == 3, ended.stderr
    assert all("rank 2" in paragraph for paragraph in ended.paragraphs), ended.stderr


@pytest.mark.parametrize("phase", PHASES)
def test_a_moment_at_which_random_faults_strike_is_a_call_that_exists(phase):
    """One had been renamed: `benchmarks/faults.py` struck nothing there any more, and took undisturbed runs for failed."""
    module, call = PHASES[phase]
    assert callable(attrgetter(call)(importlib.import_module(module)))
