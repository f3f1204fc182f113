"""Checkpoints that fail on two ranks: in the background said at once, tried again, and the end only where that fails."""

import errno
import functools
import json
import os
import resource
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest

from hethub.runtime.checkpoint import CheckpointManager, dcp
from hethub.runtime.loop.trainer import Trainer
from tests.runtime.program.test_program_jobs import write_program_job
from tests.support.command import Ended, ranks
from tests.support.job_files import write_pair_job


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_pair_job(tmp_path / "job", train={"steps": 8}, checkpoint={"every_steps": 4, "keep": 3})


def fail_on(victim: int, error: Exception, failing: range, rank: int) -> None:
    """The saves of these steps fail there. A step takes until the save before it has ended, so that a failure is known in
    the step behind the one that was to be saved."""
    finish, save, run_step = CheckpointManager._finish, CheckpointManager.save, Trainer.run_step
    writing: list[Any] = []

    def finish_or_fail(self: Any, partial: Path, record: Any) -> Any:
        if record["step"] in failing:
            raise error
        return finish(self, partial, record)

    def remembered(self: Any, *arguments: Any, **more: Any) -> None:
        save(self, *arguments, **more)
        writing[:] = [future for future in [self._writing] if future is not None]

    def patient(self: Any, step: int, **more: Any) -> Any:
        wait(writing)
        return run_step(self, step, **more)

    Trainer.run_step = patient  # type: ignore[method-assign]
    CheckpointManager.save = remembered  # type: ignore[method-assign]
    if rank == victim:
        CheckpointManager._finish = finish_or_fail  # type: ignore[method-assign]


def train(job: Path, error: Exception, failing: range, *more: str, victim: int = 1) -> tuple[list[Ended], list[str]]:
    """How both ranks ended, and what log.txt says behind its times."""
    run, hook = job.parent / "run", functools.partial(fail_on, victim, error, failing)
    ended = ranks(2, "train", job, "--run-dir", run, *more, cwd=job.parent, hook=hook)
    return ended, [line.split(" ", 2)[2] for line in (run / "log.txt").read_text().splitlines()]


def position(lines: list[str], *begins: str) -> list[int]:
    return [next(number for number, line in enumerate(lines) if line.startswith(begin)) for begin in begins]


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/shared/__1_0.distcp")


def test_a_failed_save_is_said_at_the_next_step_and_tried_again(job: Path) -> None:
    ended, log = train(job, FULL, range(4, 5))
    assert [rank.exit_code for rank in ended] == [0, 0], ended[0].stderr
    warning = (
        "warning: checkpoint of step 4 could not be written: rank 1: [Errno 28] No space left on device: '/shared/__1_0"
    )
    assert sum(warning in line for line in ended[0].stdout.splitlines()) == 1
    places = position(log, "step 5/8", warning, "checkpoint of step 5", "step 6/8", "checkpoint of step 8")
    assert places == sorted(places)
    assert {"checkpoint of step 4 begun", "checkpoint of step 5", "checkpoint of step 8"} <= {
        *log
    }  # those are complete
    checkpoints = job.parent / "run" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-5", "step-8"]


@pytest.mark.parametrize("error", [FULL, MemoryError("no room for the checksums")])
def test_a_save_that_fails_for_good_ends_the_run_when_the_next_is_due(job: Path, error: Exception) -> None:
    ended, log = train(job, error, range(4, 100))
    assert [rank.exit_code for rank in ended] == [1, 1]
    (said,) = ended[0].paragraphs
    cause = "No space left" if isinstance(error, OSError) else "MemoryError: no room for the checksums"
    assert said.startswith("hethub: checkpoint of step 8 could not be written: rank 1: ")
    assert cause in said
    failed = [line.removeprefix("warning: ")[:20] for line in log if "could not be written" in line]
    assert failed == [f"checkpoint of step {step}" for step in (4, 5, 6, 7)]
    assert [line.startswith("warning") for line in log if "could not be written" in line] == [True, False, False, False]
    rows = (job.parent / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == list(range(1, 9))
    assert not list((job.parent / "run" / "checkpoints").iterdir())  # nothing takes the room that is needed


@pytest.mark.parametrize(("steps", "last"), [(6, 6), (9, 8)], ids=["the run's end", "the next that is due"])
def test_a_save_that_fails_for_good_ends_the_run_at(job: Path, steps: int, last: int) -> None:
    ended, _ = train(job, FULL, range(4, 100), "--set", f"train.steps={steps}")
    assert [rank.exit_code for rank in ended] == [1, 1]
    assert ended[0].paragraphs[0].startswith(f"hethub: checkpoint of step {last} could not be written: rank 1: ")


def test_a_rank_that_can_write_tells_of_one_that_cannot(job: Path) -> None:
    """The failing one told it, and where its log lay on the same full disk nobody did."""
    ended, _ = train(job, FULL, range(4, 100), victim=0)
    assert [rank.exit_code for rank in ended] == [1, 1]
    assert not ended[0].paragraphs
    assert ended[1].paragraphs[0].startswith("hethub: checkpoint of step 8 could not be written: rank 0: ")


def short_files_on_rank_1(rank: int) -> None:
    """While a program's checkpoint is written there."""
    write = dcp.write

    def write_short(*given: Any, **options: Any) -> None:
        most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, most[1]))
        try:
            write(*given, **options)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, most)

    if rank == 1:
        dcp.write = write_short


def test_what_refused_a_programs_checkpoint_is_named(tmp_path: Path) -> None:
    """It was said of the place in the file where torch.save stood then."""
    job = write_program_job(tmp_path / "job", "Words", size=2)
    ended = ranks(2, "train", job, "--run-dir", tmp_path / "run", cwd=tmp_path, hook=short_files_on_rank_1)
    assert [rank.exit_code for rank in ended] == [1, 1]
    (said,) = [paragraph for rank in ended for paragraph in rank.paragraphs]
    assert f"rank 1: [Errno {errno.EFBIG}] {os.strerror(errno.EFBIG)}" in said
    assert "Make room or allow it there." in said
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
