"""A run's state from its files: who runs it, how far it is, what it prints."""

import json
import os
import shlex
import socket
import time
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from hethub.runtime.run_claim import OWNER, started_ticks
from hethub.runtime.run_folder import SETTLING_STEPS, RunFolder
from hethub.spec.base import build
from hethub.spec.documents import read_yaml
from hethub.spec.errors import BadInput
from hethub.spec.job import PYTHON, JobSpec

RECENT = 20  # steps whose median counts
LAST_LINES = 5  # of log.txt


class Seen(NamedTuple):
    text: str
    goes_on: bool


def look(path: Path) -> Seen:
    """What a run folder says now. Raises BadInput where it is none."""
    if not (path / "job.yaml").exists():
        raise BadInput(f"{path}: there is no run here (job.yaml is missing); name the folder that train printed.")
    if not any((path / name).exists() for name in (OWNER, "prediction.json", "metrics.jsonl")):
        raise BadInput(f"{path}: there is no run here: job.yaml is a job to train; name the folder that train printed.")
    data, source = read_yaml(path / "job.yaml", "job file")
    job, folder = build(JobSpec, data, source, "job file"), RunFolder(path)
    # As far back as the last evaluation can lie: a long run has a hundred megabytes of metrics.
    rows = folder.newest_rows(max(RECENT, 0 if job.eval is None else job.eval.every_steps))
    state, goes_on = _state(path)
    lines = [f"{path}: {state}"]
    if rows:
        written = folder.metrics.stat().st_mtime if goes_on else None
        lines += _progress(rows, job.train.steps, written, _items(path, job))
    names = [path.name.removeprefix("step-") for path in folder.checkpoints.glob("step-*")]
    steps = sorted(int(name) for name in names if name.isdigit())
    lines.append(f"checkpoints: {', '.join(f'step {step}' for step in steps) if steps else 'none yet'}")
    log = path / "log.txt"
    if log.exists():
        lines += log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
    return Seen("\n".join(lines), goes_on)


def _state(path: Path) -> tuple[str, bool]:
    """Whether somebody runs it, as far as owner.json and this host can tell."""
    try:
        record = json.loads((path / OWNER).read_text(encoding="utf-8"))
        pid, host, since = int(record["pid"]), str(record["host"]), str(record["since"])
    except FileNotFoundError:
        return "nobody runs it now", False
    except (ValueError, KeyError, TypeError):
        return "a job has just begun", True
    if host == socket.gethostname() and os.path.isdir("/proc/self"):
        began = started_ticks(pid)
        if began is None or began != record.get("started_ticks", began):
            return f"process {pid} ended before the run did; go on with --resume {shlex.quote(str(path))}", False
    return f"process {pid} on {host} runs it since {since}", True


def _items(path: Path, job: JobSpec) -> str:
    """What a rate of the run counts: samples where a module brings batches of its own."""
    if not job.model.startswith(PYTHON):
        return "tokens"
    try:
        predicted = json.loads((path / "prediction.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "tokens"
    return "samples" if predicted.get("tokens_per_second") is None else "tokens"


def _progress(rows: list[dict[str, Any]], last: int, written: float | None, items: str) -> list[str]:
    newest, seconds = rows[-1], median(settled_seconds(rows)[-RECENT:])
    predicted = newest.get("predicted_step_seconds")
    loss = "overflow" if newest.get("loss") is None else f"{newest['loss']:.4f}"
    beside = "" if not predicted else f", predicted {predicted:.4g} s"
    lines = [f"step {newest['step']} of {last}: loss {loss}, {seconds:.4g} s a step{beside}"]
    if tokens := newest.get("tokens"):
        lines[0] += f", {tokens / seconds:,.0f} {items}/s"
    if written is not None and newest["step"] < last:
        left = (last - newest["step"]) * seconds * (newest.get("time_scale") or 1.0)  # real seconds of an emulation's
        short = f"{left:.0f} s" if left < 120 else f"{left / 60:.0f} minutes"
        shown = short if left < 3600 else f"{left / 3600:.1f} hours"
        lines.append(f"last step {time.time() - written:.0f} s ago; about {shown} left")
    evaluated = [row for row in rows if row.get("eval_loss") is not None]
    if evaluated:
        lines.append(f"held-out loss {evaluated[-1]['eval_loss']:.4f} at step {evaluated[-1]['step']}")
    return lines


def under_last_plan(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last lines of metrics, as far back as steps were predicted like the last one: a run that went on under another
    plan, or measured itself anew, has steps of several."""
    alike = takewhile(
        lambda row: row.get("predicted_step_seconds") == rows[-1].get("predicted_step_seconds"), reversed(rows)
    )
    return list(alike)[::-1]


def settled_seconds(rows: Sequence[dict[str, Any]]) -> list[float]:
    """What the steps of `under_last_plan` took; where there are more, without the first ones, which the summary of
    `hethub train` leaves out as well."""
    seconds = [row["step_seconds"] for row in under_last_plan(rows)]
    return seconds[SETTLING_STEPS:] or seconds
