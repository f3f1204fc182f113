"""A run killed between any two of its writes, or whose disk is full from one on, is started again, or resumed, by the
same command, and loses nothing."""

import builtins
import errno
import functools
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import Ended, one, ranks
from tests.support.job_files import write_job

KILLED = 9
CALLS = ("replace", "rename", "unlink", "mkdir", "fsync")


def kill_at(number: int, rank: int) -> None:
    """Ends this process, as SIGKILL would, before the `number`-th change of the file system by Python."""
    count = 0

    def watched(name: str) -> Any:
        original = getattr(os, name)

        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                os._exit(KILLED)
            return original(*arguments, **named)

        return call

    for name in CALLS:
        setattr(os, name, watched(name))


def kill_before(call: str, name: str, rank: int) -> None:
    """Ends this process before it renames something to `name`."""
    original = getattr(os, call)

    def watched(source: Any, target: Any, **named: Any) -> Any:
        if os.path.basename(os.fspath(target)) == name:
            os._exit(KILLED)
        return original(source, target, **named)

    setattr(os, call, watched)


def fill_at(number: int, rank: int) -> None:
    """From the `number`-th time on that Python makes a file or folder, adds to one or syncs it, there is no room."""
    count = 0

    def refuse(path: Any) -> None:
        nonlocal count
        count += 1
        if count >= number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def refused(original: Any) -> Any:
        def call(path: Any, *arguments: Any, **named: Any) -> Any:
            refuse(path)
            return original(path, *arguments, **named)

        return call

    original_open = io.open

    def opened(path: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        if not isinstance(path, int) and set(mode) & set("wxa"):
            refuse(path)
        return original_open(path, mode, *arguments, **named)

    io.open = builtins.open = opened  # type: ignore[assignment]
    os.mkdir, os.fsync = refused(os.mkdir), refused(os.fsync)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    train = {"steps": 4, "precision": "fp64"}
    return write_job(tmp_path_factory.mktemp("job"), cluster_name="detect", plan="auto", train=train)


@pytest.fixture(scope="module")
def wanted(job: Path) -> list[float]:
    ended, run = start(job, job.parent / "whole")
    assert ended.exit_code == 0, ended.stderr
    return losses(run)


def start(job: Path, run: Path, *arguments: Any, hook: Any = None) -> tuple[Ended, Path]:
    return one(ranks(1, "train", job, *(arguments or ("--run-dir", run)), cwd=job.parent, hook=hook)), run


def losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    return [row["loss"] for row in rows]


def go_on(job: Path, run: Path) -> Ended:
    """The same command again; where it says that there is something to resume, that."""
    ended, _ = start(job, run)
    if ended.exit_code == 2:
        assert f"continue it with --resume {run}" in ended.stderr
        ended, _ = start(job, run, "--resume", run)
    assert ended.exit_code == 0, ended.stderr
    assert not (run / "owner.json").exists()
    return ended


@pytest.mark.parametrize(
    ("call", "name", "said"),
    [
        ("rename", "step-2", "resumed behind step 2"),
        pytest.param("replace", "plan.yaml", "begins again at step 1", marks=pytest.mark.slow),
        pytest.param("replace", "COMPLETE", "begins again at step 1", marks=pytest.mark.slow),
        pytest.param("replace", "job.yaml", "begins again at step 1", marks=pytest.mark.slow),
        pytest.param("rename", "step-4", "resumed behind step 4", marks=pytest.mark.slow),
    ],
)
def test_a_run_killed_while_it_writes_goes_on(
    call: str, name: str, said: str, job: Path, wanted: list[float], tmp_path: Path
) -> None:
    ended, run = start(job, tmp_path / "run", hook=functools.partial(kill_before, call, name))
    assert ended.exit_code == KILLED
    assert said in go_on(job, run).stdout
    assert losses(run) == wanted


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_killed_at_any_write_goes_on(job: Path, wanted: list[float], tmp_path: Path) -> None:
    number, ended = 0, Ended(exit_code=KILLED, stdout="", stderr="")
    while ended.exit_code == KILLED:
        number += 1
        ended, run = start(job, tmp_path / str(number), hook=functools.partial(kill_at, number))
        if ended.exit_code == KILLED:
            go_on(job, run)
            assert losses(run) == wanted
    assert ended.exit_code == 0, ended.stderr
    assert number > 20


@pytest.mark.slow
def test_a_resumed_start_that_was_cut_off_goes_on_too(job: Path, wanted: list[float], tmp_path: Path) -> None:
    _, run = start(job, tmp_path / "run", hook=functools.partial(kill_before, "replace", "index.json"))
    ended, _ = start(job, run, "--resume", run)
    assert ended.exit_code == 0, ended.stderr
    assert losses(run) == wanted


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_disk_that_is_full_from_any_write_on_is_named_and_the_run_goes_on(
    job: Path, wanted: list[float], tmp_path: Path
) -> None:
    number, code, codes = 0, 1, set()
    while code != 0:
        number += 1
        ended, run = start(job, tmp_path / str(number), hook=functools.partial(fill_at, number))
        code = ended.exit_code
        codes.add(code)
        if code != 0:
            assert code in (1, 2), (number, ended.stderr)
            (said,) = ended.paragraphs
            assert "No space left on device" in said, (number, said)
            assert "Traceback" not in ended.stderr, (number, ended.stderr)
            go_on(job, run)
        assert losses(run) == wanted, number
    assert codes == {0, 1, 2}
    assert number > 20
