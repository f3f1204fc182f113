"""Full disks, short limits, closed folders: a paragraph, the exit code of the interface, the last checkpoint whole."""

import functools
import json
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checkpoints import newest_intact
from tests.support.command import Ended, mpirun, needs_mpirun, one, ranks
from tests.support.job_files import plan, write_job, write_pair_job
from tests.support.privileges import SMALL_SHARED_MEMORY, lay_down, needs_mounts


@pytest.fixture
def job(tmp_path: Path) -> Path:
    train = {"steps": 6, "precision": "fp64"}
    return write_job(tmp_path / "job", cluster_name="detect", plan="auto", train=train)


def train(job: Path, *arguments: object, size: int = 1, hook: object = None) -> list[Ended]:
    return ranks(size, "train", job, *arguments, cwd=job.parent, hook=hook)  # type: ignore[arg-type]


def paragraph(ended: Ended, *codes: int) -> str:
    """The only thing said, where the command ended with one of the codes."""
    assert ended.exit_code in codes, ended.stderr
    assert "Traceback" not in ended.stderr, ended.stderr
    said = [line for line in ended.paragraphs if "the one before is tried" not in line]
    assert len(said) == 1, ended.stderr
    return said[0]


def losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 7))
    return [row["loss"] for row in rows]


def mount(folder: Path, size: str) -> bool:
    options = f"size={size}" + (",remount" if os.path.ismount(folder) else "")
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    return (
        shutil.which("mount") is not None and subprocess.run(command, capture_output=True, check=False).returncode == 0
    )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few blocks."""
    folder = tmp_path / "small"
    folder.mkdir()
    if not mount(folder, "8k"):
        pytest.skip("runs where this user may mount a tmpfs: the disk has to be really full")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
def test_a_full_disk_is_named_at_every_write_and_the_run_goes_on(job: Path, small_disk: Path) -> None:
    (whole,) = train(job, "--run-dir", job.parent / "whole")
    assert whole.exit_code == 0, whole.stderr
    needed = sum(path.stat().st_size for path in (job.parent / "whole").rglob("*") if path.is_file())
    run, arguments, said = small_disk / "run", ("--run-dir", small_disk / "run"), set()
    for part in (0.005, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9):  # the disk grows, and is full at a later write each time
        assert mount(small_disk, str(int(needed * part)))
        text = paragraph(one(train(job, *arguments)), 1, 2)
        said.add(text)
        assert "No space left" in text or "no longer" in text
        if (run / "checkpoints").is_dir() and list((run / "checkpoints").glob("step-?")):
            assert newest_intact(run / "checkpoints") is not None
            arguments = ("--resume", run)
    assert mount(small_disk, "256m")
    last = one(train(job, *arguments))
    assert last.exit_code == 0, last.stderr
    assert losses(run) == losses(job.parent / "whole")
    assert len(said) >= 3


def short_files(rank: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))


def few_files(number: int, rank: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, number))


def little_memory(rank: int) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (48 << 20), resource.RLIM_INFINITY))


def test_a_write_that_is_refused_is_named(job: Path) -> None:
    run = job.parent / "run"
    text = paragraph(one(train(job, "--run-dir", run, hook=short_files)), 1)
    assert "File too large" in text
    again = one(train(job, "--run-dir", run))
    assert again.exit_code == 0, again.stderr
    assert losses(run)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "number"), [(1, 64), (2, 80)])
def test_some_tens_of_open_files_are_enough_for_two_ranks(size: int, number: int, job: Path) -> None:
    """Whatever plan is found: two copies with shares of the optimizer's state need 68."""
    results = train(job, "--run-dir", job.parent / "run", size=size, hook=functools.partial(few_files, number))
    assert [ended.exit_code for ended in results] == [0] * size, results[0].stderr


@pytest.mark.slow
def test_the_remedy_of_a_group_that_has_no_files_left_is_said_once(tmp_path: Path) -> None:
    """Two copies with shares of the optimizer's state have a group of their own, for which 64 are too few."""
    copies = [{"ranks": [rank], "micro_batch": 2, "samples": 4} for rank in range(2)]
    shares = plan([{"layers": [[0, 4]], "replicas": copies, "zero": 1}], cluster="detected")
    job = write_job(tmp_path / "job", cluster_name="detect", plan_file=shares)
    results = train(job, "--run-dir", tmp_path / "run", size=2, hook=functools.partial(few_files, 64))
    assert [ended.exit_code for ended in results] == [1, 1], results[0].stderr
    for text in (line for ended in results for line in ended.paragraphs):
        assert text.count("Raise the limit of open files (ulimit -n)") == 1, text


@pytest.mark.slow
@pytest.mark.parametrize(("size", "number"), [(1, 24), (1, 40), (2, 40), (2, 48), (4, 64)])
def test_too_few_open_files_are_named_with_the_remedy(size: int, number: int, tmp_path: Path) -> None:
    """Every rank ends; each says why, or leaves it to one that says what all found."""
    cluster = {1: {"cluster_name": "detect", "plan": "auto"}, 2: {}, 4: {}}[size]
    job = (write_pair_job if size == 2 else write_job)(
        tmp_path / "job", train={"steps": 6}, communicator={"timeout_seconds": 20}, **cluster
    )
    results = train(job, "--run-dir", tmp_path / "run", size=size, hook=functools.partial(few_files, number))
    assert not any("Traceback" in ended.stderr for ended in results)
    assert {ended.exit_code for ended in results} in ({1}, {2}), [ended.stderr for ended in results]
    said = [line for ended in results for line in ended.paragraphs]
    assert len(said) == (1 if results[0].exit_code == 2 else size), said
    assert any("Too many open files" in line and "ulimit -n" in line for line in said), said


@pytest.mark.slow
def test_little_memory_is_named(job: Path) -> None:
    large = write_job(
        job.parent, cluster_name="detect", plan="auto", model={"hidden": 512, "ffn": 2048, "heads": 8, "kv_heads": 8}
    )
    text = paragraph(one(train(large, "--run-dir", job.parent / "run", hook=little_memory)), 1, 2)
    assert "memory" in text


def test_a_closed_folder_is_named(job: Path) -> None:
    closed = job.parent / "closed"
    closed.mkdir(mode=0o555)
    text = paragraph(one(train(job, "--run-dir", closed / "run", hook=lay_down)), 2)
    assert "cannot write there (Permission denied)" in text


@needs_mpirun
@pytest.mark.slow
@needs_mounts
def test_a_small_shared_memory_is_gone_around_in_one_line(tmp_path: Path) -> None:
    job = write_pair_job(tmp_path / "job", communicator={"relay": "mpi"})
    ended = mpirun(2, "train", job, "--run-dir", tmp_path / "run", cwd=tmp_path, behind=SMALL_SHARED_MEMORY)
    assert ended.exit_code == 0, ended.stderr
    (line,) = ended.paragraphs
    assert "/dev/shm has less than the 32 MiB that Open MPI shares" in line
