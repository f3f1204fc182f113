"""When a rank dies or fails, every process ends within seconds, names it, and the command exits with 1."""

import os
import signal
import sys
import time
from functools import partial

import pytest

from hethub.runtime.data.tokenise import tokenise
from hethub.runtime.loop.trainer import Trainer
from tests.support.command import Running, needs_mpirun, ranks, start_mpirun
from tests.support.job_files import write_job


def trained(run, step):
    path = run / "metrics.jsonl"
    return path.exists() and len(path.read_text().splitlines()) >= step


@needs_mpirun
def test_a_rank_killed_at_step_3_is_named_by_all_others(tmp_path):
    job, run = write_job(tmp_path / "job", train={"steps": 5000}), tmp_path / "run"
    running = start_mpirun(4, "train", job, "--run-dir", run, cwd=tmp_path)
    running.wait_until(lambda: trained(run, 3))
    os.kill(running.rank_pid(2), signal.SIGKILL)
    killed = time.monotonic()
    ended = running.end()  # fails if a process is left behind
    assert time.monotonic() - killed < 60  # communicator.timeout_seconds
    assert ended.exit_code == 1
    assert len(ended.paragraphs) == 3
    assert all("rank 2 is gone" in paragraph for paragraph in ended.paragraphs)
    assert "Traceback" not in ended.stderr
    assert "terminate called" not in ended.stderr  # an interpreter finalised under threads in native calls


CUT_WHILE_MAPPED = """
import os
import sys
from pathlib import Path
import hethub.cli
from hethub.runtime.data.token_file import read_token_file

def train():
    _, tokens = read_token_file(Path("a.bin"))
    os.truncate("a.bin", 4096)
    return int(tokens.sum())

hethub.cli.run = train
sys.exit(hethub.cli.main())
"""


def test_a_token_file_that_is_cut_while_it_is_read_ends_with_a_word(tmp_path):
    """All ranks died at once, so nobody was left to name one, and `mpirun --continuous` ended with 0."""
    (tmp_path / "a.txt").write_text("text" * 5000)
    tokenise([tmp_path / "a.txt"], "bytes", tmp_path / "a.bin", progress=False)
    ended = Running([sys.executable, "-P", "-c", CUT_WHILE_MAPPED], tmp_path, {}).end()
    assert ended.exit_code == -signal.SIGBUS
    assert "Fatal Python error: Bus error" in ended.stderr


SPEAK_IN_TURN = """
import os, sys, time
from pathlib import Path
from hethub.cli import main
Path("ready-" + os.environ["OMPI_COMM_WORLD_RANK"]).touch()
while len(list(Path().glob("ready-*"))) < 4:
    time.sleep(0.01)
time.sleep(0.2 * int(os.environ["OMPI_COMM_WORLD_RANK"]))
sys.exit(main())
"""


@needs_mpirun
def test_ranks_that_fail_one_after_another_are_all_heard(tmp_path):
    """mpirun kills who is left when half the ranks have failed, so nobody leaves at once."""
    program = [sys.executable, "-P", "-c", SPEAK_IN_TURN]
    ended = start_mpirun(4, "plan", "missing.yaml", cwd=tmp_path, program=program).end()
    assert ended.exit_code == 2
    assert len(ended.paragraphs) == 4
    assert all("missing.yaml" in paragraph for paragraph in ended.paragraphs)


def fail_at_step_3(failing_rank, rank):
    """One rank has a bug that shows at step 3."""
    if rank == failing_rank:
        run_step = Trainer.run_step

        def failing(self, step, **more):
            if step == 3:
                raise KeyError("no such tensor")
            return run_step(self, step, **more)

        Trainer.run_step = failing


@pytest.mark.parametrize("failing", [0, 1])
def test_a_ranks_own_exception_shows_its_traceback_once(failing, tmp_path):
    job = write_job(tmp_path / "job", train={"steps": 5000})
    hook = partial(fail_at_step_3, failing)
    results = ranks(4, "train", job, "--run-dir", tmp_path / "run", cwd=tmp_path, hook=hook)
    assert [ended.exit_code for ended in results] == [1] * 4
    assert [ended.stderr.count("Traceback") for ended in results] == [int(rank == failing) for rank in range(4)]
    assert "KeyError: 'no such tensor'" in results[failing].stderr
    for rank in set(range(4)) - {failing}:
        (paragraph,) = results[rank].paragraphs
        assert f"rank {failing} failed: KeyError: 'no such tensor'" in paragraph


def fail_before_the_world(rank):
    """Rank 0, which serves the store and plans for all, fails while the others wait for it."""
    if rank == 0:
        from hethub.runtime.loop import plan

        def failing(*_, **__):
            raise ZeroDivisionError("of the planner")

        plan._decide = failing


def test_a_failure_before_the_ranks_are_connected_ends_all(tmp_path):
    job = write_job(tmp_path / "job")
    results = ranks(4, "train", job, "--run-dir", tmp_path / "run", cwd=tmp_path, hook=fail_before_the_world)
    assert [ended.exit_code for ended in results] == [1] * 4
    assert [ended.stderr.count("Traceback") for ended in results] == [1, 0, 0, 0]
    for ended in results[1:]:
        (paragraph,) = ended.paragraphs
        assert "rank 0 failed: ZeroDivisionError: of the planner" in paragraph
    assert not (tmp_path / "run").exists()


def die_before_the_world(rank):
    """Rank 2 dies when the ranks have met and are to tell what they have read."""
    if rank == 2:
        from hethub.runtime.loop import read

        read.open_dataset = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_dies_before_the_ranks_are_connected_is_named_within_the_timeout(tmp_path):
    job = write_job(tmp_path / "job", communicator={"timeout_seconds": 30})
    results = ranks(4, "train", job, "--run-dir", tmp_path / "run", cwd=tmp_path, hook=die_before_the_world)
    for rank in (0, 1, 3):
        assert results[rank].exit_code == 1
        assert "Traceback" not in results[rank].stderr
        assert any("rank 2" in paragraph for paragraph in results[rank].paragraphs)


def test_a_loss_that_is_not_finite_ends_the_run_with_a_sentence(tmp_path):
    wild = {"lr": 1e20, "min_lr": 0.0, "warmup_steps": 0, "grad_clip": None, "steps": 20}
    job = write_job(tmp_path / "job", train=wild, checkpoint={"every_steps": 1})
    results = ranks(4, "train", job, "--run-dir", tmp_path / "run", cwd=tmp_path)
    assert [ended.exit_code for ended in results] == [1] * 4
    assert [len(ended.paragraphs) for ended in results] == [1, 0, 0, 0]
    assert "the gradient is not finite" in results[0].paragraphs[0]
    assert "Lower train.lr" in results[0].paragraphs[0]
    assert all("Traceback" not in ended.stderr for ended in results)
    last = len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert (tmp_path / "run" / "checkpoints" / f"step-{last}" / "COMPLETE").exists()
