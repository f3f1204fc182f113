"""What a run is made of before and beside its steps: which plan it takes, its folder, its signals, what it prints."""

import io
import json
import math
import os
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import yaml
from rich.console import Console

from hethub import __version__
from hethub.predictor.pipeline.timeline import Span
from hethub.runtime.loop import read
from hethub.runtime.loop.display import TrainingDisplay, describe
from hethub.runtime.loop.plan import OpenedFolder, _decide, _measured_before, _plan_file, _ranks_measure, open_folder
from hethub.runtime.loop.step_report import StepOutcome, StepReporter, gather_outcome
from hethub.runtime.loop.steps import TrainingLoop
from hethub.runtime.measure.speed_classes import tell_apart
from hethub.runtime.metrics import StepMetrics
from hethub.runtime.run_claim import RunClaim
from hethub.runtime.run_folder import RunFolder
from hethub.spec.errors import BadInput, RunFailed
from hethub.spec.job import load_job, load_plan_of
from hethub.spec.layout.bind import bind
from hethub.spec.plan import load_plan
from tests.support.job_files import MODEL, plan, write_job, write_yaml


def metrics(step, loss=2.0, grad_norm=1.0):
    return StepMetrics(
        step=step, loss=loss, tokens=256, step_seconds=0.5, predicted_step_seconds=0.4, tokens_per_second=512.0,
        grad_norm=grad_norm, lr=1e-3, memory_bytes=1000,
    )  # fmt: skip


@pytest.fixture
def job(tmp_path):
    return load_job(write_job(tmp_path / "job"))


def finished_run(path, content):
    (path / "checkpoints").mkdir(parents=True)
    write_yaml(path / "plan.yaml", content)
    return RunFolder(path)


# -- which device ------------------------------------------------------------------------------------------------------


def test_a_device_that_does_not_compute_in_the_jobs_precision_is_named(job, monkeypatch):
    device = SimpleNamespace(name="T4", supports=lambda dtype: dtype != torch.float32)
    monkeypatch.setattr(read, "open_device", lambda cluster, info: device)
    info = SimpleNamespace(rank=3)
    with pytest.raises(BadInput, match=r"train\.precision is fp32, which T4 \(rank 3\) does not compute in"):
        read.check_job(job, info)
    fitting = load_job(job.path, ["train.precision=bf16", "plan=auto"])
    assert read.check_job(fitting, info) == (fitting, device)


# -- which plan --------------------------------------------------------------------------------------------------------


def opened(folder: RunFolder, goes_on: bool) -> OpenedFolder:
    return OpenedFolder(folder, goes_on, resumes=goes_on, behind=None, notes=[])


def test_a_plan_that_is_named_is_taken(job, tmp_path):
    new = opened(RunFolder(tmp_path / "run"), goes_on=False)
    assert _plan_file(job, None, new, job.cluster) == tmp_path / "job" / "plan.yaml"
    other = tmp_path / "other.yaml"
    assert _plan_file(job, other, new, job.cluster) == other


def test_a_resumed_run_keeps_its_plan_while_the_cluster_is_the_same(tmp_path):
    job = load_job(write_job(tmp_path / "job", plan="auto"))
    folder = finished_run(tmp_path / "run", plan())
    assert _plan_file(job, None, opened(folder, goes_on=True), job.cluster) == folder.plan
    assert _plan_file(job, None, opened(folder, goes_on=True), job.cluster.replace(name="larger")) is None
    assert _plan_file(job, None, opened(folder, goes_on=False), job.cluster) is None
    for change in ("global_batch=16", "seq_len=64", "precision=bf16"):  # as --accept-changes lets it
        changed = load_job(job.path, [f"train.{change}"])
        assert _plan_file(changed, None, opened(folder, goes_on=True), job.cluster) is None, change


@pytest.mark.parametrize(
    ("asks", "said"),
    [
        ("constraints.zero=3", "constraints.zero was None, is 3"),
        ("constraints.reserve=0.2", "constraints.reserve was 0.06, is 0.2"),
        ("plan=uniform", "plan was auto, is uniform"),
    ],
)
def test_a_resumed_run_that_asks_for_another_plan_gets_it_and_says_so(tmp_path, asks, said):
    """It kept the old one without a word, and the run folder's job.yaml had what the plan beside it did not keep to."""
    job = load_job(write_job(tmp_path / "job", plan="auto"))
    folder = finished_run(tmp_path / "run", plan())
    folder.start(job, bind(load_plan(folder.plan), job.model, job.cluster), {}, {})
    changed, again = load_job(job.path, [asks]), opened(folder, goes_on=True)
    assert _plan_file(changed, None, again, job.cluster) is None
    assert again.notes == [f"planned anew, since the job asks for another plan: {said}"]
    named = opened(folder, goes_on=True)
    assert _plan_file(changed, folder.plan, named, job.cluster) == folder.plan
    assert not named.notes


def test_a_resumed_run_keeps_no_plan_of_other_accelerators(tmp_path):
    """`cluster: detect` gives every cluster one name; ranks that were told apart are still those."""
    job = load_job(write_job(tmp_path / "job", plan="auto"))
    told = tell_apart(job.cluster, [0] * (job.cluster.size - 1) + [1])
    for before in (job.cluster, told):
        folder = finished_run(tmp_path / before.nodes[0].name, plan())
        layout = bind(load_plan(folder.plan), job.model, before)
        folder.start(job, layout, {}, {})
        again = opened(folder, goes_on=True)
        assert _plan_file(job, None, again, job.cluster) == folder.plan
        nodes = tuple(node.replace(accelerator="A100-SXM4-80GB") for node in job.cluster.nodes)
        assert _plan_file(job, None, again, job.cluster.replace(nodes=nodes)) is None


def test_a_plan_for_other_training_settings_is_refused(job, tmp_path):
    path = write_yaml(tmp_path / "other.yaml", plan(precision="bf16"))
    with pytest.raises(
        BadInput,
        match=r"other\.yaml: the plan was made for precision bf16, but .*job\.yaml, line \d+: train\.precision is fp32",
    ):
        load_plan_of(job, path)


def test_a_plan_that_is_named_takes_the_place_of_a_damaged_one(tmp_path):
    job = load_job(write_job(tmp_path / "job", plan="auto"))
    again = opened(finished_run(tmp_path / "run", {"version": 1}), goes_on=True)
    other = tmp_path / "other.yaml"
    assert _plan_file(job, other, again, job.cluster) == other
    with pytest.raises(BadInput, match="Restore the plan, name one with --plan, or delete it"):
        _plan_file(job, None, again, job.cluster)


LAYER = {"micro_batch": 1, "seq_len": 32, "tp": 1, "forward_seconds": 0.1, "backward_seconds": 0.2}


@pytest.mark.parametrize(
    ("software", "precision", "emulated", "counts"),
    [
        (__version__, "fp32", False, True),
        ("0", "fp32", False, False),
        (__version__, "bf16", False, False),
        (__version__, "fp32", True, False),
    ],
    ids=["the same", "another hethub", "another precision", "other ranks"],
)
def test_what_a_run_had_measured_counts_where_it_goes_on_alike(job, tmp_path, software, precision, emulated, counts):
    folder = RunFolder(tmp_path / "run")
    folder.start(job, bind(load_plan_of(job, job.plan_path), job.model, job.cluster), {}, {})
    device = {"accelerator": job.cluster.places[0].accelerator.name, "precision": precision, "layers": [LAYER]}
    measured = {"date": "2026-01-01", "hethub": software, "software": "test", "model": MODEL, "devices": [device]}
    folder.write_profile(measured)
    cluster, profile = _measured_before(folder, job, job.cluster.replace(emulated=emulated))
    assert cluster == job.cluster.replace(emulated=emulated)
    assert (profile is not None) == counts
    compiled = load_job(job.path, ["train.compile=true"])  # which may change, and with it what layers take
    assert _measured_before(folder, compiled, job.cluster) == (job.cluster, None)


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_run_that_has_lost_its_plan_says_which_it_takes(job, tmp_path, goes_on):
    folder = RunFolder(tmp_path / "run")
    found = _decide(job, job.cluster, None, job.plan_path, opened(folder, goes_on))
    assert found["notes"] == [f"{folder.plan} is missing: the plan is the job's"] * goes_on


@pytest.mark.parametrize(
    ("measure", "vendor", "micro_batch", "measures"),
    [
        ("auto", "nvidia", "null", True),
        ("auto", "nvidia", 2, False),
        ("auto", "cpu", "null", False),
        ("always", "cpu", 2, True),
        ("never", "nvidia", "null", False),
    ],
)
def test_ranks_measure_themselves_on_devices_or_where_that_is_wished(tmp_path, measure, vendor, micro_batch, measures):
    path = write_job(tmp_path / "job", plan="auto")
    job = load_job(path, [f"measure={measure}", f"constraints.micro_batch={micro_batch}"])
    facts = [SimpleNamespace(vendor="cpu"), SimpleNamespace(vendor=vendor)]
    assert _ranks_measure(job, job.cluster, facts) == measures
    assert not _ranks_measure(job, job.cluster.replace(emulated=True), facts)


# -- the run folder ----------------------------------------------------------------------------------------------------


def test_the_job_in_a_run_folder_names_whole_paths(tmp_path):
    write_job(tmp_path / "job")
    relative = os.path.relpath(tmp_path / "job" / "job.yaml")
    folder = RunFolder(tmp_path / "far" / "run")
    job = load_job(relative)
    folder.start(job, bind(load_plan_of(job, job.plan_path), job.model, job.cluster), {}, {})
    again = load_job(folder.path / "job.yaml")
    assert again.model == job.model
    assert again.cluster == job.cluster
    assert again.plan_path == tmp_path / "job" / "plan.yaml"
    assert again.spec.data.path == str(tmp_path / "job" / "text.txt")
    written = yaml.safe_load((folder.path / "job.yaml").read_text())
    original = yaml.safe_load((tmp_path / "job" / "job.yaml").read_text())
    assert written["train"].items() >= original["train"].items()


def test_a_move_to_other_ranks_that_is_cut_off_leaves_no_relays_of_the_old_ones(job, tmp_path):
    folder, relays = RunFolder(tmp_path / "run"), {"near": [[0, "mpi"]], "far": [[0, "gloo"]]}
    folder.open(job, job.cluster, "", {}, {"relays": relays})
    assert folder.relays(job.cluster) == relays
    nodes = tuple(node.replace(accelerators=2 * node.accelerators) for node in job.cluster.nodes)
    moved = job.cluster.replace(nodes=nodes)
    folder.plan.unlink()
    folder.plan.mkdir()  # nothing can be written there
    with pytest.raises(RunFailed, match="cannot be written"):
        folder.open(job, moved, "", {}, {"relays": None})
    assert folder.relays(moved) is None


def test_metrics_behind_a_checkpoint_are_cut(tmp_path):
    folder = RunFolder(tmp_path)
    for step in range(1, 6):
        folder.append(metrics(step))
    folder.cut_behind(3)
    folder.append(metrics(4, loss=1.5))
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert rows == [metrics(1).to_dict(), metrics(2).to_dict(), metrics(3).to_dict(), metrics(4, loss=1.5).to_dict()]


def test_what_was_said_of_slow_ranks_behind_a_checkpoint_is_cut(tmp_path):
    folder = RunFolder(tmp_path)
    rows = [{"rank": 1, "measured_seconds": {"step": 0.5}, "step": step, "text": "slow"} for step in (3, 4)]
    for row in rows:
        folder.append_straggler(row)
    with (tmp_path / "drift.jsonl").open("a") as file:
        file.write('{"step": 3, "te')
    folder.cut_behind(3)
    assert [json.loads(line) for line in (tmp_path / "drift.jsonl").read_text().splitlines()] == rows[:1]


def test_a_file_with_damaged_lines_is_kept_each_time(tmp_path):
    folder, damaged = RunFolder(tmp_path), []
    for number, name in enumerate(["metrics.jsonl.set-aside", "metrics.jsonl.set-aside-2"], 1):
        with folder.metrics.open("a") as file:
            file.write(f"{json.dumps(metrics(number).to_dict())}\nwhat a disk has made of line {number}\n")
        damaged.append((name, folder.metrics.read_text()))
        assert folder.cut_behind(number) == [f"damaged lines in metrics.jsonl: 1; as it was, it is {name} now"]
        assert [row["step"] for row in folder.rows()] == list(range(1, number + 1))
    assert [(name, (tmp_path / name).read_text()) for name, _ in damaged] == damaged


@pytest.mark.parametrize("steps", [0, 3])
def test_a_half_written_last_line_is_cut_too(tmp_path, steps):
    """As a process that was killed, or a disk that is full, leaves it; the next line stands on its own."""
    folder = RunFolder(tmp_path)
    for step in range(1, steps + 1):
        folder.append(metrics(step))
    with folder.metrics.open("a") as file:
        file.write('{"step": 4, "lo')
    folder.cut_behind(steps)
    folder.append(metrics(steps + 1))
    assert [row["step"] for row in folder.rows()] == list(range(1, steps + 2))


def test_a_folder_with_a_run_is_not_new_and_one_without_cannot_be_resumed(tmp_path):
    folder = RunFolder(tmp_path)
    folder.check_new()
    with pytest.raises(BadInput, match="no run to resume"):
        folder.check_resumable()
    folder.append(metrics(1))
    with pytest.raises(BadInput, match="holds a run already"):
        folder.check_new()


@pytest.mark.parametrize(
    ("every", "keep_every", "said"),
    [
        (20, 60, None),
        (20, None, None),
        (20, 30, "keep_every 30 is no multiple of every_steps 20: only those of steps 60, 120, … stay for good"),
        ("null", 30, "keep_every 30 is no multiple of every_steps null: checkpoints are written at the end alone"),
    ],
)
def test_what_is_to_stay_for_good_and_is_never_written_is_said(job, tmp_path, every, keep_every, said):
    """Of `every_steps: 20, keep_every: 30` every other one was missing without a word."""
    given = load_job(job.path, [f"checkpoint={{every_steps: {every}, keep_every: {keep_every or 'null'}}}"])
    with RunClaim() as claim:
        notes = open_folder(given, tmp_path / "run", None, claim, accept_changes=False).notes
    assert len(notes) == (said is not None)
    assert said is None or said in notes[0]


# -- lines of steps ---------------------------------------------------------------------------------------------------


def test_a_long_run_prints_a_plain_line_for_so_many_steps():
    out = io.StringIO()
    with TrainingDisplay(1, 1000, every=50, console=Console(file=out, width=240)) as display:
        for step in range(1, 1001):
            display.step(metrics(step))
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("step 50/1000  loss 2.0000  lr ")
    assert "grad norm 1.000" in lines[0]
    assert lines[-1].startswith("step 1000/1000")
    assert len(lines) == 20


def test_a_step_is_what_all_ranks_say_together():
    """Loss and squares come times the loss scale, 8: (24 + 8) / 8, and the root of 48² + 64² by 8."""

    class World:
        def all_gather_objects(self, own):
            return [own, [8.0, 64.0**2, 700, False, True, {"forward": 2.0}]]

    found = gather_outcome(
        World(),
        loss=24.0,
        square_sum=48.0**2,
        memory_bytes=500,
        stop_requested=False,
        busy_seconds=None,
        loss_scale=8.0,
    )
    assert (found.loss, found.grad_norm, found.memory_bytes) == (4.0, 10.0, 700)
    assert (found.stop_requested, found.save_failed) == (False, True)
    assert found.busy_seconds == (None, {"forward": 2.0})


def test_a_line_has_a_steps_tokens_their_rate_and_what_it_communicated(job):
    totals = iter([1, 3, 6])

    def counters():
        return {"operations": [{"group": "all", "operation": "all_reduce", "calls": next(totals)}], "links": []}

    reporter = StepReporter(SimpleNamespace(counters=counters))
    given = {"tokens": 8 * 32, "step_seconds": 0.5, "predicted_step_seconds": None, "lr": 0.1}
    for loss, told, calls in ((2.0, 2.0, 2), (math.inf, None, 3)):
        line = reporter.metrics(1, StepOutcome(loss, 1.0, 0, False, False, ()), **given)
        assert (line.loss, line.tokens, line.tokens_per_second) == (told, 8 * 32, 512.0)
        assert [row["calls"] for row in line.communication["operations"]] == [calls]


def test_spans_are_told_on_rank_0s_clock():
    """A rank whose clock is 10 s behind, of an emulation at half the pace."""

    class World:
        rank = 0

        def all_gather_objects(self, own):
            return [own]

        def counters(self):
            return {}

    own = Span(0, "compute", "F1", 1.0, 2.0)
    loop = SimpleNamespace(
        world=World(), _speaks=True, _spans=[[own]], _paces=[], _replanner=None, planned=SimpleNamespace(layout=None),
        trainer=SimpleNamespace(pace=SimpleNamespace(seconds=lambda seconds: seconds / 2, time_scale=None)),
        folder=SimpleNamespace(path=None, write_counters=lambda counters: None), _losses=[1.0], _seconds=[1.0],
        _predicted_seconds=1.0,
    )  # fmt: skip
    loop._ended = partial(TrainingLoop._ended, loop)
    assert TrainingLoop._finish(loop, 1, False, 10.0).spans == [Span(0, "compute", "F1", 5.5, 6.0)]


def test_a_skipped_step_says_so():
    assert "skipped: fp16 overflow" in describe(metrics(3, grad_norm=None), 10, 1)
