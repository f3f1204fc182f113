"""Ranks that a plan leaves unused: started, told what all are told, heard when they die; training does not notice
them."""

import json
import os
import signal

import pytest

from hethub.predictor import predict, rank_memory
from hethub.report.html import report_run
from hethub.spec.errors import BadInput
from hethub.spec.plan import load_plan
from tests.support.command import needs_mpirun, ranks, start_mpirun
from tests.support.emulated import EMULATED, NODES, layout
from tests.support.job_files import plan, write_job

TWO = [
    {"layers": [[0, 2]], "replicas": [{"ranks": [2], "micro_batch": 2, "samples": 8}]},
    {"layers": [[2, 4]], "replicas": [{"ranks": [3], "micro_batch": 4, "samples": 8}]},
]
UNUSED = plan(TWO, unused=[0, 1], precision="fp64")
TRAIN = {"steps": 4, "precision": "fp64"}


def losses(run):
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def trained(folder, *arguments, size=4, **job):
    ended = ranks(size, "train", write_job(folder / "job", train=TRAIN, **job), *arguments, cwd=folder)
    assert [end.exit_code for end in ended] == [0] * size, [end.stderr for end in ended]
    return ended[0]


def test_a_run_saves_evaluates_and_goes_on_with_rank_0_unused(tmp_path):
    """Rank 0, which writes and speaks, has no part of the model."""
    tmp_path.joinpath("with").mkdir()
    tmp_path.joinpath("without").mkdir()
    more = {"eval": {"every_steps": 2, "batches": 2, "data": {"source": "text", "path": "text.txt"}}}
    ended = trained(tmp_path / "with", "--run-dir", "run", plan_file=UNUSED, checkpoint={"every_steps": 2}, **more)
    run = tmp_path / "with" / "run"
    assert "held-out loss" in ended.stdout
    assert load_plan(run / "plan.yaml").unused == (0, 1)
    trained(tmp_path / "without", "--run-dir", "run", plan_file=plan(precision="fp64"), **more)
    assert losses(run) == pytest.approx(losses(tmp_path / "without" / "run"), rel=1e-10)
    job = write_job(tmp_path / "with" / "job", train={**TRAIN, "steps": 6}, plan_file=UNUSED, **more)
    (end, *_) = ranks(4, "train", job, "--resume", run, "--accept-changes", cwd=tmp_path)
    assert end.exit_code == 0, end.stderr
    assert len(losses(run)) == 6


def test_the_report_shows_them(tmp_path):
    trained(tmp_path, "--run-dir", "run", plan_file=UNUSED)
    report_run(tmp_path / "run", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert 'title="rank 0, unused"' in page
    assert "What is grey is unused." in page


def test_an_emulation_keeps_the_time_of_those_that_are_used(tmp_path):
    trained(tmp_path, "--run-dir", "run", cluster=EMULATED, plan_file=UNUSED)
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["predicted_step_seconds"] == pytest.approx(
        predict(layout(TWO, unused=[0, 1], precision="fp64")).step_seconds
    )
    report = json.loads((tmp_path / "run" / "rehearsal.json").read_text())
    assert len(report["overrun_percent_by_rank"]) == 4
    assert row["step_seconds"] >= predict(layout(TWO, unused=[0, 1], precision="fp64")).breakdown["compute"]


@needs_mpirun
def test_one_that_dies_is_named_by_all_others(tmp_path):
    job, run = write_job(tmp_path / "job", train={"steps": 5000}, plan_file=plan(TWO, unused=[0, 1])), tmp_path / "run"
    running = start_mpirun(4, "train", job, "--run-dir", run, cwd=tmp_path)
    running.wait_until(lambda: (run / "metrics.jsonl").exists())
    os.kill(running.rank_pid(1), signal.SIGKILL)
    ended = running.end()
    assert ended.exit_code == 1
    assert len(ended.paragraphs) == 3
    assert all("rank 1 is gone" in paragraph for paragraph in ended.paragraphs)


def test_the_prediction_is_that_of_the_cluster_without_them():
    """Their islands too: what is unused takes no time, no memory and no link."""
    whole = layout(TWO, unused=[0, 1])
    stages = [{**stage, "replicas": [{**stage["replicas"][0], "ranks": [rank]}]} for rank, stage in enumerate(TWO)]
    alone = layout(stages, {**EMULATED, "nodes": NODES[1:]})
    ours, theirs = predict(whole, with_timeline=True), predict(alone, with_timeline=True)
    assert (ours.step_seconds, ours.breakdown) == (theirs.step_seconds, theirs.breakdown)
    assert [entry.rank for entry in rank_memory(whole)] == [2, 3]
    assert [entry[1:] for entry in ours.memory] == [entry[1:] for entry in theirs.memory]
    assert ours.percent_of_ceiling < theirs.percent_of_ceiling  # of all accelerators that the job holds


def test_they_may_be_of_a_device_that_cannot_compute_so():
    cluster = {**EMULATED, "nodes": [{**NODES[0], "accelerator": "V100-SXM2-16GB"}, NODES[1]]}
    with pytest.raises(BadInput, match=r"does not compute in it; .* or list its ranks in the plan's `unused`"):
        layout(cluster=cluster, precision="bf16")
    assert predict(layout(TWO, cluster, unused=[0, 1], precision="bf16")).step_seconds > 0
