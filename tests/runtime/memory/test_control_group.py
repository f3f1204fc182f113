"""A run in a control group of little more than its predicted memory lives, in one of less the kernel ends it."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from hethub.predictor import rank_memory
from hethub.spec.job import load_job
from hethub.spec.layout.bind import bind
from hethub.spec.plan import load_plan
from tests.support.command import HETHUB, Ended, mpirun, needs_mpirun
from tests.support.job_files import plan, write_job

MODEL = {"layers": 12, "hidden": 768, "heads": 12, "kv_heads": 12, "ffn": 2048, "vocab": 8192}  # 97 M parameters
GROUP = f"/sys/fs/cgroup/memory/hethub-test-{os.getpid()}-"  # and the rank
CLUSTER = {"nodes": [{"name": "cpu", "accelerator": "CPU-core", "accelerators": 2}]}


@contextmanager
def limited(*sizes: int) -> Iterator[list[Path]]:
    """A memory group of so many bytes for each rank (control groups of version 1), gone behind the block.

    One for all ranks would tell less: that they are at their peaks in the same moment is nothing that a prediction
    promises, and on a busy machine they are not.
    """
    groups = [Path(f"{GROUP}{rank}") for rank in range(len(sizes))]
    with ExitStack() as stack:
        for group, num_bytes in zip(groups, sizes, strict=True):
            group.mkdir()
            stack.callback(_remove, group)
            (group / "memory.limit_in_bytes").write_text(str(num_bytes))
        yield groups


def _remove(group: Path) -> None:
    """Ends what is still in the group: a group goes when it is empty."""
    for _ in range(100):
        for pid in (group / "tasks").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        with suppress(OSError):
            return group.rmdir()
        time.sleep(0.1)
    raise AssertionError(f"{group} cannot be removed")


def why_no_groups() -> str | None:
    """What this machine lacks for them, or None."""
    try:
        with limited(1 << 30):
            return None
    except OSError as error:
        return f"needs control groups of version 1 that it may make ({GROUP}0: {error})"


def write(stages: list[dict[str, Any]], folder: Path) -> list[int]:
    """Writes the job; the bytes that each rank needs, in host memory too, checkpoint and all."""
    train = {"steps": 2, "seq_len": 64}
    path = write_job(
        folder, model=MODEL, cluster=CLUSTER, train=train, plan_file=plan(stages, seq_len=64), measure="never"
    )
    job = load_job(path)
    assert job.cluster is not None
    found = rank_memory(bind(load_plan(folder / "plan.yaml"), job.model, job.cluster))
    return [entry.bytes + entry.host_bytes for entry in found]


EACH = [{"ranks": [rank], "micro_batch": 1, "samples": 4} for rank in (0, 1)]
REPLICAS = [{"layers": [[0, 12]], "replicas": EACH, "zero": 1}]
HALVES = [
    {"layers": [[6 * rank, 6 * rank + 6]], "replicas": [{"ranks": [rank], "micro_batch": 1, "samples": 8}]}
    for rank in (0, 1)
]


def train_in(groups: list[Path], folder: Path) -> tuple[Ended, list[int]]:
    """How the run ended each of whose ranks is in its group, and how many processes the kernel killed in each."""
    enter = f'echo $$ > {GROUP}$OMPI_COMM_WORLD_RANK/tasks && exec "$@"'
    ended = mpirun(2, "train", "job.yaml", cwd=folder, program=("sh", "-c", enter, "sh", HETHUB))
    kept = [dict(line.split() for line in (group / "memory.oom_control").read_text().splitlines()) for group in groups]
    return ended, [int(own["oom_kill"]) for own in kept]


@needs_mpirun
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stages", [REPLICAS, HALVES], ids=["zero 1", "1f1b"])
def test_a_run_needs_what_was_predicted(stages: list[dict[str, Any]], tmp_path: Path) -> None:
    if (reason := why_no_groups()) is not None:
        pytest.skip(reason)
    predicted = write(stages, tmp_path)
    with limited(*(int(1.1 * own) for own in predicted)) as groups:
        ended, killed = train_in(groups, tmp_path)
    assert (ended.exit_code, killed) == (0, [0, 0]), ended.stderr
    with limited(*(int(0.9 * own) for own in predicted)) as groups:
        ended, killed = train_in(groups, tmp_path)
    assert any(killed)
    assert ended.exit_code != 0 or all(killed)  # mpirun --continuous says 0 where signals killed all of its ranks
