"""A killed job's shared memory is removed by the next job: its own, and only where nobody uses it."""

import mmap
import os
import shutil
import signal
import socket
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from hethub.communicator.joining import segments as segments_module
from hethub.communicator.joining.segments import (
    BACKING_VARIABLE,
    SHARED_MEMORY,
    leave_segments,
    place_segments,
    remove_dead_segments,
)
from tests.support.command import needs_mpirun, start_mpirun
from tests.support.job_files import write_pair_job
from tests.support.privileges import SMALL_SHARED_MEMORY, needs_mounts


def test_only_dead_segments_of_this_user_and_host_are_removed(tmp_path):
    own = f"sm_segment.{socket.gethostname()}.{os.getuid()}"
    dead, alive, young = f"{own}.5e560001.0", f"{own}.5e560001.1", f"{own}.22720001.0"
    others = [f"sm_segment.elsewhere.{os.getuid()}.5e560001.0", f"sm_segment.{socket.gethostname()}.4242.5e560001.0",
              "sm_segment.mine", "hethub"]  # fmt: skip
    for name in (dead, alive, young, *others):
        (tmp_path / name).write_bytes(b"\0" * mmap.PAGESIZE)
        if name != young:
            os.utime(tmp_path / name, (time.time() - 3600,) * 2)
    with open(tmp_path / alive, "r+b") as segment, mmap.mmap(segment.fileno(), mmap.PAGESIZE):
        assert remove_dead_segments([tmp_path]) == [dead]
        assert {path.name for path in tmp_path.iterdir()} == {alive, young, *others}
    assert remove_dead_segments([tmp_path]) == [alive]


def test_segments_are_looked_for_where_a_small_dev_shm_has_put_them(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead = f"sm_segment.{socket.gethostname()}.{os.getuid()}.5e560001.0"
    (tmp_path / dead).write_bytes(b"0")
    os.utime(tmp_path / dead, (time.time() - 3600,) * 2)
    assert dead in remove_dead_segments()


def test_folders_that_jobs_have_left_go_with_their_segments(tmp_path):
    uid, name = os.getuid(), f"sm_segment.{socket.gethostname()}.{os.getuid()}.5e560001.0"
    left, empty, alive, young, other = folders = [
        tmp_path / f"hethub-mpi.{owner}.{job}"
        for owner, job in [(uid, "a"), (uid, "b"), (uid, "c"), (uid, "d"), (4242, "e")]
    ]
    for folder in folders:
        folder.mkdir()
        if folder not in (empty, young):
            (folder / name).write_bytes(b"\0" * mmap.PAGESIZE)
            os.utime(folder / name, (time.time() - 3600,) * 2)
        if folder != young:
            os.utime(folder, (time.time() - 3600,) * 2)
    with open(alive / name, "r+b") as segment, mmap.mmap(segment.fileno(), mmap.PAGESIZE):
        assert remove_dead_segments([tmp_path]) == [name]
    assert not left.exists()
    assert not empty.exists()
    assert all(path.exists() for path in (alive / name, young, other / name))


def test_what_another_owns_stays_whatever_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    path = tmp_path / f"sm_segment.{socket.gethostname()}.{os.getuid()}.5e560001.0"
    path.write_bytes(b"0")
    os.utime(path, (time.time() - 3600,) * 2)
    assert remove_dead_segments([tmp_path]) == []
    assert path.exists()


@pytest.mark.parametrize(("free", "place"), [(1 << 30, "shm"), (0, "tmp")])
def test_a_job_shares_memory_in_a_folder_of_its_own_where_there_is_room(tmp_path, monkeypatch, free, place):
    for name in ("shm", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(segments_module, "SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    monkeypatch.setenv(BACKING_VARIABLE, "")
    monkeypatch.delenv(BACKING_VARIABLE)
    place_segments(local_rank=0, local_size=2, job="a")
    folder = Path(os.environ[BACKING_VARIABLE])
    assert folder.parent == tmp_path / place
    assert folder.is_dir()
    leave_segments()
    assert not folder.exists()


def test_where_the_user_has_memory_shared_stays(tmp_path, monkeypatch):
    monkeypatch.setenv(BACKING_VARIABLE, str(tmp_path))
    place_segments(local_rank=0, local_size=2, job="a")
    assert os.environ[BACKING_VARIABLE] == str(tmp_path)
    leave_segments()
    assert tmp_path.exists()


@needs_mpirun
@needs_mounts
@pytest.mark.slow
def test_jobs_whose_segments_have_one_name_do_not_meet(tmp_path, request):
    """As in containers that share a host's name and memory: mpirun is process 1 of each. A plain MPI job ended by SIGSEGV."""
    job = write_pair_job(tmp_path / "job", communicator={"relay": "mpi"}, train={"steps": 5000})

    def start(name):
        running = start_mpirun(
            2, "train", job, "--run-dir", tmp_path / name, cwd=tmp_path, behind=("unshare", "-p", "-f", "--mount-proc")
        )
        request.addfinalizer(running.kill)
        running.wait_until((tmp_path / name / "metrics.jsonl").exists)
        return running

    def folders():
        return set(SHARED_MEMORY.glob(f"hethub-mpi.{os.getuid()}.*"))

    before = folders()
    first = start("first")
    (one,) = folders() - before
    second = start("second")
    (other,) = folders() - before - {one}
    assert sorted(path.name for path in one.iterdir()) == sorted(path.name for path in other.iterdir())
    for running, folder in ((first, one), (second, other)):
        os.kill(running.rank_pid(1), signal.SIGTERM)  # it stops behind its step
        running.end()
        assert not folder.exists()


@needs_mpirun
@needs_mounts
@pytest.mark.slow
def test_what_a_killed_job_left_beside_a_small_dev_shm_goes_with_the_next(tmp_path, request):
    job, temporary = write_pair_job(tmp_path / "job", communicator={"relay": "mpi"}), tmp_path / "t"
    temporary.mkdir()

    def start(name, *more):
        return start_mpirun(
            2, "train", job, *more, "--run-dir", tmp_path / name, cwd=tmp_path,
            environment={"TMPDIR": str(temporary)}, behind=SMALL_SHARED_MEMORY,
        )  # fmt: skip

    def segments():
        return list(temporary.rglob("sm_segment.*"))

    first = start("first", "--set", "train.steps=5000")
    request.addfinalizer(first.kill)
    first.wait_until((tmp_path / "first" / "metrics.jsonl").exists)
    assert len(segments()) == 2
    for pid in first.pids():
        os.kill(pid, signal.SIGKILL)
    first.process.wait()
    left = segments()
    assert left
    for path in left:
        os.utime(path, (time.time() - 3600,) * 2)
    ended = start("second").end()
    assert ended.exit_code == 0, ended.stderr
    assert not set(left) & set(segments())
