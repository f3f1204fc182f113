"""A rank slower than planned is named, with what a new plan would bring; and the run goes on under it exactly."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hethub.kernels.device import Device
from hethub.predictor import LayerCost
from hethub.predictor.profiled import ProfiledLayerCost
from hethub.runtime.drift import Drifted, DriftWatch, planned_seconds, slowed
from hethub.runtime.pace import WatchedPace
from hethub.spec.job import DriftSpec
from hethub.spec.plan import load_plan
from hethub.spec.schedule import Kind
from tests.planner.test_profiled import profile
from tests.runtime.test_rehearsal import layout
from tests.support.command import ranks
from tests.support.job_files import write_job

SPEC = DriftSpec(threshold=0.2, steps=3)


def test_a_rank_is_named_once_it_was_slow_for_long_enough():
    watch = DriftWatch([1.0, 2.0, 4.0], SPEC)
    slow = [1.0, 3.0, 4.0]
    assert watch.note(slow) == watch.note(slow) == []
    assert watch.note(slow) == [Drifted(1, 1.5)]
    assert watch.note(slow) == []  # told once
    assert watch.note([1.0, 2.0, 4.0]) == []  # it recovers
    assert [watch.note(slow) for _ in range(3)][-1] == [Drifted(1, 1.5)]


def test_a_single_slow_step_is_no_drift():
    watch = DriftWatch([1.0, 1.0], SPEC)
    assert all(not watch.note(step) for step in [[1.0, 9.0], [1.0, 9.0], [1.0, 1.0]] * 3)


@given(st.floats(0.1, 10.0), st.lists(st.floats(0.1, 10.0), min_size=1, max_size=8))
def test_what_all_ranks_have_in_common_is_no_drift(error, planned):
    watch = DriftWatch(planned, SPEC)
    assert not any(watch.note([error * seconds for seconds in planned]) for _ in range(5))


@pytest.mark.parametrize("given", [None, profile({"T4": 1e-3}, layout().model)])
def test_slow_ranks_get_accelerators_of_their_own_that_take_as_much_longer(given):
    bound = layout()
    told, measured = slowed(bound, given, {1: 2.04})
    names = [place.accelerator.name for place in told.places]
    assert names == ["A100-SXM4-80GB", "A100-SXM4-80GB!1", "MI250X-GCD", "MI250X-GCD"]
    plain = LayerCost(bound.model, bound.cluster.places[1].accelerator, 32, "fp32")
    slow = ProfiledLayerCost(bound.model, told.places[1].accelerator, 32, "fp32").use(measured.device(names[1], "fp32"))
    assert slow.layer(4).total == pytest.approx(2 * plain.layer(4).total)
    assert slow.head(2).total == pytest.approx(2 * plain.head(2).total)


def test_planned_work_is_that_of_all_tiles_times_what_is_known():
    plain = planned_seconds(layout(), None)
    assert len(plain) == 4
    assert plain[2] == plain[3] > 0  # one replica
    again = planned_seconds(layout(), None, {0: 1.5})
    assert again[0] == pytest.approx(1.5 * plain[0])
    assert again[1:] == plain[1:]


def test_a_real_device_is_timed_between_entering_and_leaving():
    pace = WatchedPace(Device(vendor="cpu"))
    pace.start_step()
    assert pace.busy_seconds == 0.0
    pace.enter(Kind.FORWARD, 0)
    pace.leave()
    first = pace.busy_seconds
    assert first is not None
    assert first > 0.0
    pace.start_step()
    assert pace.busy_seconds == 0.0


# -- in a run ----------------------------------------------------------------------------------------------------------

NODES = [{"name": "t4", "accelerator": "T4", "accelerators": 2, "gbps_per_nic": 100}]
BIG = {"hidden": 64, "ffn": 176, "heads": 4, "kv_heads": 2}
EVEN = [{"layers": [[0, 4]], "replicas": [{"ranks": [r], "micro_batch": 1, "samples": 8} for r in range(2)]}]


def job(folder, slowdown, **more):
    return write_job(
        folder, model=BIG, cluster={"name": "pair", "emulated": True, "nodes": NODES}, train={"steps": 8, "global_batch": 16},
        plan_file={
            "version": 1, "model": "tiny", "cluster": "pair", "global_batch": 16, "seq_len": 32, "precision": "fp32",
            "schedule": "1f1b", "stages": EVEN,
        },
        rehearsal={"slowdown": slowdown}, constraints={"pp": 1, "tp": 1},
        drift={"threshold": 0.2, "steps": 2}, checkpoint={"every_steps": 4, "keep": 2}, **more,
    )  # fmt: skip


def losses(run):
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def replanned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drift")
    path = job(folder / "job", {1: 2.0}, replan="auto")
    ended = ranks(2, "train", path, "--run-dir", folder / "run", cwd=folder)
    assert [end.exit_code for end in ended] == [0, 0], ended[0].stderr
    return ended[0], folder / "run"


def test_the_slow_rank_is_reported_with_the_gain(replanned):
    ended, run = replanned
    assert "rank 1 (T4, node 't4') has taken 2.00x its planned time for 2 steps" in ended.stdout
    first, second = [json.loads(line) for line in (run / "drift.jsonl").read_text().splitlines()]
    assert (first["rank"], first["factor"]) == (1, pytest.approx(2.0))
    assert first["gain_percent"] > 10
    assert second["step"] == 4  # the checkpoint behind which the new plan holds


def test_the_new_plan_gives_the_slow_rank_less(replanned):
    ended, run = replanned
    (stage,) = load_plan(run / "plan.yaml").stages
    samples = {replica.ranks[0]: replica.samples for replica in stage.replicas}
    assert samples[0] > samples[1]
    assert sum(samples.values()) == 16
    assert "goes on under a new plan" in ended.stdout
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["predicted_step_seconds"] != rows[0]["predicted_step_seconds"]


def test_the_loss_goes_on_exactly(replanned, tmp_path):
    path = job(tmp_path / "job", {}, replan="auto")
    ended = ranks(2, "train", path, "--run-dir", tmp_path / "run", cwd=tmp_path)
    assert ended[0].exit_code == 0, ended[0].stderr
    assert not (tmp_path / "run" / "drift.jsonl").exists()  # nobody was slow
    assert losses(replanned[1]) == pytest.approx(losses(tmp_path / "run"), rel=1e-5)


def test_nobody_watches_where_the_job_says_never(tmp_path):
    path = job(tmp_path / "job", {1: 2.0}, replan="never")
    ended = ranks(2, "train", path, "--run-dir", tmp_path / "run", cwd=tmp_path)
    assert ended[0].exit_code == 0, ended[0].stderr
    assert "planned time" not in ended[0].stdout
