"""A run folder has one owner, whom the second comer is told; a dead owner's folder is taken over."""

import errno
import fcntl
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from hethub.runtime.run_claim import OWNER, RunClaim, started_ticks
from hethub.spec.errors import BadInput, RunFailed

HOLD = """
import sys
from pathlib import Path
from hethub.runtime.run_claim import RunClaim
claim = RunClaim()
print(claim.take_new(Path(sys.argv[1])) if sys.argv[2] == "new" else claim.take(Path(sys.argv[1])), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has claimed `run`."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", HOLD, tmp_path / "run", "named"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "None\n"
    yield process
    process.kill()
    process.communicate()


def test_the_second_comer_is_told_the_owner_and_a_dead_one_is_followed(
    holder: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    run = tmp_path / "run"
    owner = json.loads((run / OWNER).read_text())
    said = (
        rf"{run}: process {holder.pid} on {re.escape(os.uname().nodename)} \(since {re.escape(owner['since'])}\) uses"
    )
    with RunClaim() as claim, pytest.raises(BadInput, match=said):
        claim.take(run)
    assert json.loads((run / OWNER).read_text()) == owner
    holder.kill()
    holder.wait()
    with RunClaim() as claim:
        assert claim.take(run) is None
        assert claim.took_over
        assert json.loads((run / OWNER).read_text())["pid"] == os.getpid()
    assert not run.exists() or not list(run.iterdir())


CUT_OFF = """
import os, sys
from pathlib import Path
from hethub.runtime.run_claim import RunClaim
setattr(os, sys.argv[2], lambda *_: os._exit(9))
RunClaim().take(Path(sys.argv[1]))
"""


@pytest.mark.parametrize("call", ["pwrite", "ftruncate"])
def test_a_dead_owner_is_known_by_a_claim_that_was_cut_off(call: str, tmp_path: Path) -> None:
    (tmp_path / OWNER).write_text("{}")
    assert subprocess.run([sys.executable, "-P", "-c", CUT_OFF, tmp_path, call], check=False).returncode == 9
    with RunClaim() as claim:
        claim.take(tmp_path)
        assert claim.took_over


def test_jobs_of_one_second_have_folders_of_their_own(holder: "subprocess.Popen[str]", tmp_path: Path) -> None:
    with RunClaim() as second, RunClaim() as third:
        assert second.take_new(tmp_path / "run") == tmp_path / "run-2"
        assert third.take_new(tmp_path / "run") == tmp_path / "run-3"
        assert not second.took_over
    assert not (tmp_path / "run-2").exists()


def end(run: Path, ending: Exception | None, *, follows: bool, writes: bool = False) -> None:
    with RunClaim() as claim:
        claim.take(run)
        assert claim.took_over == follows
        if writes:
            (run / "log.txt").touch()
        if ending is not None:
            raise ending


@pytest.mark.parametrize("ending", [None, BadInput("key"), RunFailed("rank 1")])
@pytest.mark.parametrize("writes", [False, True])
def test_the_record_stays_where_the_owner_ended_badly(ending: Exception | None, writes: bool, tmp_path: Path) -> None:
    run = tmp_path / "far" / "run"
    with pytest.raises(type(ending)) if ending is not None else nullcontext():
        end(run, ending, follows=False, writes=writes)
    assert (run / OWNER).exists() == (writes and isinstance(ending, RunFailed))
    assert (tmp_path / "far").exists() == writes  # what the claim made goes with it, where nothing was written


def test_bad_input_leaves_a_dead_owners_record(tmp_path: Path) -> None:
    (tmp_path / OWNER).write_text('{"pid"')
    with pytest.raises(BadInput, match="key"):
        end(tmp_path, BadInput("key"), follows=True)
    assert (tmp_path / OWNER).exists()


def test_a_record_that_cannot_be_read_still_keeps_others_out(tmp_path: Path) -> None:
    with (tmp_path / OWNER).open("w") as file:
        file.write("[" * 3000)
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(BadInput, match="another job, which has just begun, uses this run folder"):
            RunClaim().take(tmp_path)


def test_a_file_system_without_locks_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with RunClaim() as claim:
        assert "without locks" in str(claim.take(tmp_path))


def spoilt(folder: Path, how: str) -> Path:
    if how == "a link":
        (folder / OWNER).symlink_to(folder / "elsewhere")
    elif how == "a folder":
        (folder / OWNER).mkdir()
    else:
        (folder / "file").write_text("")
        return folder / "file" / "run"
    return folder


@pytest.mark.parametrize("how", ["a link", "a folder", "below a file"])
def test_a_folder_that_cannot_be_claimed_is_named(how: str, tmp_path: Path) -> None:
    with pytest.raises(
        BadInput, match=r"this rank cannot write there \(.*\)\. Choose another run folder .*\(--resume COPY\)"
    ):
        RunClaim().take(spoilt(tmp_path, how))
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_in_the_place_of_a_run_folder_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        BadInput, match=r"file: this is a file, and a run's folder is to be written; give another --run-dir\."
    ):
        RunClaim().take(tmp_path / "file")
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="processes are looked up in /proc")
def test_a_process_that_ended_is_gone_before_anybody_waits_for_it():
    """`hethub watch` said that it runs, for ever in a container whose first process waits for none."""
    child = subprocess.Popen(["sleep", "0"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and stays to be waited for
    assert Path(f"/proc/{child.pid}/stat").exists()
    assert started_ticks(child.pid) is None
    assert started_ticks(os.getpid()) is not None
    child.wait()
