"""docs/index.md as a new user follows it: every line of its shell blocks in a shell, from an empty folder, the smallest
figures in place of its own; what transformers then says is what `hethub generate` said."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import AS_ROOT, BIN, HANG_SECONDS, Ended, Running, needs_mpirun

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "index.md").read_text(encoding="utf-8")
SMALL = {"steps: 60": "steps: 4", "global_batch: 16": "global_batch: 4", "seq_len: 128": "seq_len: 32"}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, re.S)


def commands() -> list[str]:
    """Every line of the shell blocks but those that install."""
    lines = [line.partition("   #")[0].strip() for block in blocks("sh")[1:] for line in block.splitlines()]
    return [line for part in lines for line in part.split(" && ")]


class Shell:
    """A user's shell in an empty folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        as_root = {**AS_ROOT, "OMP_NUM_THREADS": "1"}
        cache = {"HETHUB_CACHE": str(folder / "cache")}
        self._environment = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", **as_root, **cache}

    def run(self, line: str) -> Ended:
        if line.startswith("cd "):
            self.folder /= line.removeprefix("cd ")
            return Ended(exit_code=0, stdout="", stderr="")
        newest = max((self.folder / "runs").glob("job-*"), default=None, key=os.path.getmtime)
        line = line.replace("runs/job-TIME", f"runs/{newest.name}" if newest else "")
        return Running(["bash", "-c", line], self.folder, self._environment).end(HANG_SECONDS)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@needs_mpirun
def test_getting_started_works_line_by_line(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install 'hethub[test]'")
    shell, said = Shell(tmp_path), ""
    todo = commands()
    assert [line.split()[:2] for line in todo[:4]] == [
        ["hethub", "init"],
        ["cd", "first"],
        ["hethub", "plan"],
        ["hethub", "launch"],
    ]
    for line in todo:
        if "mine.jsonl" in line:
            write_own_text(shell.folder)
            line = line.replace("train.steps=200", "train.steps=6")
        ended = shell.run(line)
        assert ended.exit_code == 0, (line, ended.stderr)
        if line.startswith("hethub init"):
            make_small(shell.folder / "first" / "job.yaml")
        if line.startswith("hethub generate"):
            said = ended.stdout
    newest = max((shell.folder / "runs").glob("job-*"), key=os.path.getmtime)
    rows = [json.loads(row) for row in (newest / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert "eval_loss" in rows[-1]
    assert (newest / "report.html").exists()
    (load,) = blocks("python")
    theirs = subprocess.run(
        [sys.executable, "-c", load],
        cwd=shell.folder,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert theirs.returncode == 0, theirs.stderr
    assert said.startswith("Once upon a time")
    assert theirs.stdout.splitlines()[-1] in said


def make_small(job: Path) -> None:
    text = job.read_text()
    for given, small in SMALL.items():
        assert given in text
        text = text.replace(given, small)
    job.write_text(text)


def write_own_text(folder: Path) -> None:
    """The two files and the keys of job.yaml that the page asks for."""
    for name, start in (("mine.jsonl", 0), ("held-out.jsonl", 5000)):
        lines = (json.dumps({"text": f"Once upon a time {n} and {n * n} met. " * 4}) for n in range(start, start + 200))
        (folder / name).write_text("\n".join(lines) + "\n")
    (keys,) = blocks("yaml")
    job = folder / "job.yaml"
    job.write_text(re.sub(r"^data: .*$", lambda _: keys, job.read_text(), count=1, flags=re.M))
