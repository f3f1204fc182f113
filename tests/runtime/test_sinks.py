"""What is told of a run's steps beside metrics.jsonl: log.txt, TensorBoard, Weights & Biases, torch's profiler."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hethub.runtime.loop.steps import StepLoop
from hethub.runtime.metrics import StepMetrics
from hethub.runtime.sinks import Sinks, StepProfiler
from hethub.spec.accelerator import find_accelerator
from hethub.spec.job import LogSpec
from tests.support.command import HANG_SECONDS, check_refused, ranks
from tests.support.job_files import CLUSTER, plan, write_job, write_pair_job, write_yaml

ROW = {"step": 3, "loss": 2.5, "lr": 1e-3, "grad_norm": None, "mfu": 20.0, "step_seconds": 0.5, "memory_bytes": 1000}


def rows(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_logs_its_steps_profiles_some_and_outlives_sinks_that_fail(tmp_path: Path) -> None:
    log = {"every_steps": 2, "tensorboard": True, "wandb": "ours", "profile_steps": [2, 3]}
    job = write_pair_job(tmp_path, log=log, train={"steps": 5})
    found = find_accelerator("CPU-core").replace(source="a data sheet")  # of an assumed peak there is no MFU
    nodes = [{**CLUSTER["nodes"][i], "accelerator": found.to_dict(), "accelerators": 1} for i in range(2)]
    write_yaml(tmp_path / "cluster.yaml", {**CLUSTER, "nodes": nodes})
    results = ranks(2, "train", job, "--run-dir", tmp_path / "run", cwd=tmp_path, hook=without_loggers)
    assert [ended.exit_code for ended in results] == [0, 0], results[0].stderr
    said, logged = results[0].stdout, (tmp_path / "run" / "log.txt").read_text()
    assert [step for step in range(1, 6) if f"step {step}/5  loss" in said] == [2, 4, 5]
    for text in (said, logged):
        for words in ("step 4/5  loss ", "lr ", "grad norm ", "(predicted ", "tokens/s (", " each)", "MFU ", " GiB"):
            assert words in text
        assert text.count("warning: tensorboard is left out from here on") == 1
        assert text.count("warning: wandb is left out from here on") == 1
        assert "pip install 'hethub[logs]'" in text
    assert "checkpoints/step-4 is complete" in logged
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4, 5]
    predicted = json.loads((tmp_path / "run" / "prediction.json").read_text())
    of_a_second = predicted["mfu"] * predicted["step_seconds"]
    assert [row["mfu"] * row["step_seconds"] for row in rows(tmp_path / "run")] == pytest.approx([of_a_second] * 5)
    for rank in range(2):
        trace = json.loads((tmp_path / "run" / "profile" / f"rank-{rank}.json").read_text())
        assert any("aten::" in event.get("name", "") for event in trace["traceEvents"])


def without_loggers(rank: int) -> None:

    sys.modules["tensorboard"] = None  # type: ignore[assignment]
    sys.modules["torch.utils.tensorboard"] = None  # type: ignore[assignment]
    sys.modules["wandb"] = None  # type: ignore[assignment]


def test_an_unknown_sink_and_a_profile_that_ends_first_are_refused(tmp_path: Path) -> None:
    for log, words in (
        ({"mlflow": True}, ["log.mlflow is not a known key", "tensorboard", "wandb"]),
        ({"profile_steps": [5, 2]}, ["profile_steps [5, 2] end before they begin"]),
        ({"every_steps": 0}, ["log.every_steps is 0"]),
    ):
        job = write_job(tmp_path / "job", log=log)
        check_refused(ranks(1, "train", job, "--run-dir", tmp_path / "run", cwd=tmp_path), *words)
        assert not (tmp_path / "run").exists()


def test_a_sink_that_fails_later_is_told_once_and_left_out(tmp_path: Path) -> None:
    said: list[str] = []
    with Sinks(LogSpec(), tmp_path, {}, said.append) as sinks:
        sinks._sinks["broken"] = Broken()
        sinks.write(ROW)
        sinks.write(ROW)
    assert said == ["warning: broken is left out from here on (ConnectionError: the server is gone)"]


def test_sinks_have_every_evaluation_and_the_lines_that_are_due() -> None:
    written: list[tuple[int, float | None]] = []
    loop: Any = SimpleNamespace(
        folder=SimpleNamespace(append=lambda metrics: None, log=lambda line: None),
        _sinks=SimpleNamespace(write=lambda row: written.append((row["step"], row.get("eval_loss")))),
        _display=SimpleNamespace(step=lambda metrics: None if metrics.step % 2 else "a line"),
    )
    for step in range(1, 5):
        metrics = StepMetrics(
            step=step, loss=2.0, tokens=1, step_seconds=1.0, predicted_step_seconds=None, tokens_per_second=1.0,
            grad_norm=1.0, lr=0.1, memory_bytes=1,
        )  # fmt: skip
        StepLoop._show(loop, metrics.with_evaluation(1.5) if step == 3 else metrics)
    assert written == [(2, None), (3, 1.5), (4, None)]


class Broken:
    def write(self, step: int, values: object) -> None:
        raise ConnectionError("the server is gone")

    def close(self) -> None:
        raise AssertionError("a sink that was left out is not closed")


def test_tensorboard_has_every_figure(tmp_path: Path) -> None:
    reading = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard: pip install 'hethub[logs]'"
    )
    with Sinks(LogSpec(tensorboard=True), tmp_path, {}, pytest.fail) as sinks:
        sinks.write(ROW)
    events = reading.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == {"loss", "lr", "mfu", "seconds/measured", "memory_bytes"}
    (loss,) = events.Scalars("loss")
    assert (loss.step, loss.value) == (3, 2.5)


def test_tensorboard_shows_nothing_of_steps_that_a_resumed_run_trains_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, Any]] = []
    writer = SimpleNamespace(close=lambda: None)
    module = SimpleNamespace(SummaryWriter=lambda folder, **more: made.append(more) or writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    with Sinks(LogSpec(tensorboard=True), tmp_path, {}, pytest.fail, first_step=4):
        pass
    assert made == [{"purge_step": 4}]


WITH_WANDB = """
import json, pathlib, sys
from hethub.runtime.sinks import Sinks
from hethub.spec.job import LogSpec
with Sinks(LogSpec(wandb="ours"), pathlib.Path(sys.argv[1]), {"train": {"steps": 3}}, sys.exit) as sinks:
    sinks.write(json.loads(sys.argv[2]))
"""


@pytest.mark.slow
def test_weights_and_biases_keeps_a_run_offline(tmp_path: Path) -> None:
    """In a process of its own: its service writes the last lines while the process ends."""
    pytest.importorskip("wandb", reason="needs wandb: pip install 'hethub[logs]'")
    run = tmp_path / "run"
    run.mkdir()
    subprocess.run(
        [sys.executable, "-c", WITH_WANDB, run, json.dumps(ROW)], check=True, timeout=HANG_SECONDS,
        env={**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"},
    )  # fmt: skip
    (record,) = run.rglob("run-*.wandb")
    content = record.read_bytes()
    assert b"loss" in content
    assert b"seconds/measured" in content


def test_a_profile_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "profile").write_text("a file in its place")
    profiler = StepProfiler((1, 1), tmp_path, 0, said.append)
    profiler.before(1)
    profiler.behind(1, ends=False, complete=lambda: None)
    (text,) = said
    assert "could not be written" in text


def test_a_profile_waits_for_operations_that_go_on_beside_the_next_step(tmp_path: Path) -> None:
    """Those that ended behind the profiler wrote to its memory, and the process ended by a signal."""
    stages = [
        {
            "layers": [[0, 4]],
            "replicas": [{"ranks": [rank], "micro_batch": 4, "samples": 4} for rank in (0, 1)],
            "zero": 1,
        }
    ]
    job = write_pair_job(
        tmp_path, plan=str(write_yaml(tmp_path / "replicas.yaml", plan(stages))), log={"profile_steps": [1, 2]}
    )
    results = ranks(2, "train", job, "--run-dir", tmp_path / "run", cwd=tmp_path, hook=with_late_ends)
    assert [ended.exit_code for ended in results] == [0, 0], results[0].stderr


def with_late_ends(rank: int) -> None:
    """Collectives end some time after their bytes are there, and a profiler refuses to stop before they have."""
    import torch

    from hethub.communicator import torch_private, work

    end, begin, stop = work.HethubWork._end, torch_private.profiled_range, torch.profiler.profile.stop
    under_way: set[object] = set()

    def begun(name: str) -> Any:
        ended, key = begin(name), object()
        if ended is None:
            return None
        under_way.add(key)
        return lambda: (under_way.discard(key), ended())

    def stopped(own: Any) -> None:
        assert not under_way
        stop(own)

    work.HethubWork._end = lambda own: time.sleep(0.2) or end(own)  # type: ignore[method-assign]
    torch_private.profiled_range = begun
    torch.profiler.profile.stop = stopped  # type: ignore[method-assign]
