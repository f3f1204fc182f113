"""A rank slower than planned is named, with what a new plan would bring; and the run goes on under it exactly."""

import json
import time
import weakref
from statistics import median
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hethub import planner
from hethub.predictor import LayerCost, predict
from hethub.predictor.cost.profiled_layer import ProfiledLayerCost
from hethub.predictor.cost.software import HETHUB, hethub_software
from hethub.runtime.checkpoint import CheckpointManager
from hethub.runtime.loop import build, replanning
from hethub.runtime.loop.replanning import Replanner
from hethub.runtime.loop.trainer import Trainer
from hethub.runtime.measure.rank_times import planned_seconds
from hethub.runtime.measure.straggler import (
    Noted,
    Remedy,
    Straggler,
    StragglerDetector,
    find_remedy,
    planning_seconds,
    slowed,
)
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput
from hethub.spec.job import StragglerSpec, TrainSpec, load_job
from hethub.spec.layout.bind import bind
from hethub.spec.plan import PlanSpec, load_plan
from tests.planner.test_profiled import profile
from tests.predictor.plans import LLAMA_8B
from tests.support.command import ranks
from tests.support.emulated import layout
from tests.support.job_files import plan, write_job

SPEC = StragglerSpec(threshold=0.2, steps=3)
NOTHING = Noted([], {})


def forward(*seconds):
    return [{"forward": each} for each in seconds]


def test_a_rank_is_named_once_it_was_slow_for_long_enough():
    watch = StragglerDetector(forward(1.0, 2.0, 4.0), SPEC)
    slow, well = forward(1.0, 3.0, 4.0), forward(1.0, 2.0, 4.0)
    assert watch.note(slow) == watch.note(slow) == NOTHING
    assert watch.note(slow) == Noted([Straggler(1, 1.5, "forward", {"forward": 3.0}, {"forward": 2.0})], {})
    assert watch.note(slow) == NOTHING  # told once
    assert [watch.note(well) for _ in range(3)] == [NOTHING, NOTHING, Noted([], {1: 1.0})]
    assert watch.note(well) == NOTHING
    assert [bool(watch.note(slow).slow) for _ in range(3)] == [False, False, True]


def test_a_single_slow_step_makes_no_straggler():
    watch = StragglerDetector(forward(1.0, 1.0), SPEC)
    assert all(watch.note(forward(*step)) == NOTHING for step in [[1.0, 9.0], [1.0, 9.0], [1.0, 1.0]] * 3)


@given(st.floats(0.1, 10.0), st.lists(st.floats(0.1, 10.0), min_size=1, max_size=8))
def test_what_all_ranks_have_in_common_makes_no_straggler(error, planned):
    watch = StragglerDetector(forward(*planned), SPEC)
    assert all(watch.note(forward(*(error * seconds for seconds in planned))) == NOTHING for _ in range(5))


def test_a_rank_slower_than_its_like_is_named_though_all_are_faster_than_planned():
    watch = StragglerDetector(forward(1.0, 1.0, 2.0), SPEC)
    assert all(watch.note(forward(0.3, 0.3, 0.6)) == NOTHING for _ in range(5))
    (found,) = [watch.note(forward(0.3, 0.39, 0.6)) for _ in range(3)][-1].slow
    assert (found.rank, found.factor) == (1, pytest.approx(1.3))


def test_a_rank_faster_than_planned_makes_none_of_another_kind_slow():
    watch = StragglerDetector(forward(1.0, 1.0), SPEC, kinds=["T4", "A40"])
    assert all(watch.note(forward(0.5, 1.1)) == NOTHING for _ in range(5))
    assert [watch.note(forward(0.5, 1.3)) for _ in range(3)][-1].slow[0].factor == pytest.approx(1.3)


def test_unused_ranks_say_nothing_of_what_is_usual():
    bound = layout(
        [{"layers": [[0, 4]], "replicas": [{"ranks": [2], "micro_batch": 4, "samples": 8}]}], unused=[0, 1, 3]
    )
    planned = planned_seconds(bound, None)
    assert [bool(own) for own in planned] == [False, False, True, False]
    watch = StragglerDetector([{}, {}, *forward(1.0, 1.0)], SPEC, kinds=[None, None, "T4", "A40"])
    assert all(watch.note([{}, {}, *forward(1.5, 1.5)]) == NOTHING for _ in range(5))


def test_a_rank_that_recovered_makes_no_other_slow():
    watch = StragglerDetector(forward(1.0, 2.0), SPEC, {1: 2.0})
    noted = [watch.note(forward(0.5, 0.5)) for _ in range(9)]
    assert [each for each in noted if each != NOTHING] == [Noted([], {1: 1.0})]


def test_the_kind_that_exceeds_its_plan_the_most_is_named():
    planned = [{"forward": 1.0, "backward": 2.0, "step": 0.1}] * 3
    slow = {"forward": 1.1, "backward": 4.0, "step": 0.3}  # all take three times as long to step
    busy = [{"forward": 1.0, "backward": 2.0, "step": 0.3}, slow, {"forward": 1.0, "backward": 2.0, "step": 0.3}]
    watch = StragglerDetector(planned, SPEC)
    (found,) = [watch.note(busy) for _ in range(3)][-1].slow
    assert (found.rank, found.kind, found.factor) == (1, "backward", pytest.approx(5.1 / 3))
    assert (found.measured, found.planned) == (slow, planned[1])
    assert not any(watch.note([{**each, "step": 9.0} for each in planned]).slow for _ in range(5))


def test_a_rank_planned_as_slow_is_told_to_be_well_again():
    watch = StragglerDetector(forward(1.0, 2.0), SPEC, {1: 2.0})
    assert [watch.note(forward(1.0, 2.0)) for _ in range(3)] == [NOTHING] * 3
    assert [watch.note(forward(1.0, 1.0)) for _ in range(4)] == [NOTHING, NOTHING, Noted([], {1: 1.0}), NOTHING]


class Watched:
    """A run of four ranks whose plan is as fast as can be; `factors` are those that plans are sought for."""

    def __init__(self, monkeypatch, present=1.5):
        self.job = SimpleNamespace(spec=SimpleNamespace(drift=SPEC, replan="auto", train=TrainSpec()))
        self.layout, self.present = layout(), present
        self.factors, self.step = [], 0
        self.waits = []  # how many plans had been sought when ranks waited for each other
        self.world = SimpleNamespace(rank=0, barrier=lambda: self.waits.append(len(self.factors)))
        monkeypatch.setattr(replanning, "find_remedy", self._remedy)
        self.replanner = Replanner(self.job, self.layout, None)

    def _remedy(self, job, layout, profile, factors):
        self.factors.append(dict(factors))
        prediction = SimpleNamespace(to_dict=dict, step_seconds=1.0)
        return Remedy(plan=layout.plan, present_step_seconds=self.present, prediction=prediction)

    def steps(self, factor):
        """Three steps in which rank 1 takes `factor` times as long as its accelerator should."""
        rows = []
        for _ in range(3):
            self.step += 10
            busy = planned_seconds(self.layout, None, {1: factor})
            rows += self.replanner.note(self.step, busy, self.world)
        return rows

    def chosen(self):
        return self.replanner.chosen(SimpleNamespace(all_gather_objects=lambda own: [own]))


def test_a_rank_that_is_slow_again_is_as_slow_as_before(monkeypatch):
    run = Watched(monkeypatch)
    (row,) = run.steps(2.0)
    assert "in 3 looked-at steps (10 to 30)" in row["text"]
    assert "50 % faster" in row["text"]
    assert row["gain_percent"] == pytest.approx(50.0)
    (row,) = run.steps(1.0)
    assert row["text"].endswith("is no longer slow; the plan stays")
    assert row["gain_percent"] is None
    assert run.chosen() is None  # what was found for the slow rank is out of date
    run.steps(2.0)
    assert run.factors == [{1: pytest.approx(2.0)}] * 2
    assert run.chosen() is not None


def test_ranks_begin_their_next_step_together_behind_the_search_for_a_plan(monkeypatch):
    """What the others did of it while rank 0 searched was missing from its time, 0.0179 s for 0.0348 s."""
    run = Watched(monkeypatch)
    for factor in (1.0, 2.0, 2.0):  # the last three steps tell nothing new
        run.steps(factor)
    assert run.waits == [1]


@pytest.mark.parametrize(("present", "is_taken"), [(1.029, False), (1.031, True)])
def test_a_plan_that_gains_little_is_not_taken(monkeypatch, present, is_taken):
    run = Watched(monkeypatch, present)
    (row,) = run.steps(2.0)
    assert ("no other plan would be faster" in row["text"]) != is_taken
    assert (run.chosen() is not None) == is_taken


def test_under_a_new_plan_factors_go_on_from_what_it_was_made_for(monkeypatch):
    run = Watched(monkeypatch)
    run.steps(2.0)
    run.replanner.follow(run.layout)
    assert run.steps(2.0) == []
    run.steps(3.0)
    run.steps(2.0)
    run.steps(3.0)
    assert run.factors == [{1: pytest.approx(factor)} for factor in (2.0, 3.0, 3.0)]
    run.replanner.follow(run.layout)
    assert run.steps(1.0)[0]["factor"] == 1.0
    assert run.factors[-1] == {}  # a plan for four healthy ranks


def test_the_search_for_a_plan_is_far_shorter_than_the_others_patience():
    def spec(limit, timeout):
        return SimpleNamespace(
            constraints=SimpleNamespace(time_limit_seconds=limit), communicator=SimpleNamespace(timeout_seconds=timeout)
        )

    assert planning_seconds(spec(None, 120.0)) == 30.0
    assert planning_seconds(spec(None, 20.0)) == 5.0
    assert planning_seconds(spec(600.0, 120.0)) == 30.0
    assert planning_seconds(spec(2.0, 120.0)) == 2.0


@pytest.mark.parametrize("software", [HETHUB, hethub_software(False)])
@pytest.mark.parametrize(
    "given", [None, *(profile({name: 1e-3}, layout().model) for name in ("T4", "A100-SXM4-80GB!1"))]
)
def test_slow_ranks_get_accelerators_of_their_own_that_take_as_much_longer(given, software):
    bound = layout()
    told, measured = slowed(bound, given, {1: 2.04}, software)
    names = [place.accelerator.name for place in told.places]
    assert names == ["A100-SXM4-80GB", "A100-SXM4-80GB!1", "MI250X-GCD", "MI250X-GCD"]
    asked = (32, "fp32", software)
    plain = LayerCost(bound.model, bound.cluster.places[1].accelerator, *asked)
    slow = ProfiledLayerCost(bound.model, told.places[1].accelerator, *asked).use(measured.device(names[1], "fp32"))
    assert slow.layer(4).total == pytest.approx(2 * plain.layer(4).total)
    assert slow.head(2).total == pytest.approx(2 * plain.head(2).total)


# -- in a run ----------------------------------------------------------------------------------------------------------

NODES = [{"name": "t4", "accelerator": "T4", "accelerators": 2, "gbps_per_nic": 100}]
BIG = {"hidden": 64, "ffn": 176, "heads": 4, "kv_heads": 2}
FAST = [{"layers": [[0, 4]], "replicas": [{"ranks": [r], "micro_batch": 1, "samples": 4} for r in (2, 3)]}]
EVEN = [{"layers": [[0, 4]], "replicas": [{"ranks": [r], "micro_batch": 1, "samples": 8} for r in range(2)]}]


def job(folder, slowdown, steps=9, **more):  # one behind the second checkpoint: the new plan is taken once
    return write_job(
        folder, model=BIG, cluster={"name": "pair", "emulated": True, "nodes": NODES},
        train={"steps": steps, "global_batch": 16},
        plan_file={
            "version": 1, "model": "tiny", "cluster": "pair", "global_batch": 16, "seq_len": 32, "precision": "fp32",
            "schedule": "1f1b", "stages": EVEN,
        },
        rehearsal={"slowdown": slowdown}, constraints={"pp": 1, "tp": 1},
        drift={"threshold": 0.2, "steps": 2}, checkpoint={"every_steps": 4, "keep": 2}, **more,
    )  # fmt: skip


@pytest.mark.parametrize("rank", [0, 1, 7])
def test_a_rank_as_fast_as_planned_changes_no_prediction(rank):
    """Its machine counted as two or three that their network joins: the step was 14 times as long, and whatever plan
    was found beside it gained as much."""
    nodes = [{"name": "nv", "accelerator": "A100-SXM4-80GB", "accelerators": 8, "gbps_per_nic": 25}]
    cluster = ClusterSpec.model_validate({"name": "one", "nodes": nodes})
    replicas = [{"ranks": list(range(8)), "samples": 8, "micro_batch": 1}]
    own = {
        "model": LLAMA_8B.name, "cluster": "one", "global_batch": 8, "seq_len": 2048, "precision": "bf16",
        "stages": [{"layers": [[0, LLAMA_8B.layers]], "replicas": replicas}],
    }  # fmt: skip
    present = bind(PlanSpec.model_validate(own), LLAMA_8B, cluster)
    told, measured = slowed(present, None, {rank: 1.0}, HETHUB)
    found = predict(bind(present.plan, LLAMA_8B, told), profile=measured)
    assert found.step_seconds == pytest.approx(predict(present).step_seconds, rel=0.01)


def test_where_the_only_slow_rank_is_well_again_a_plan_is_sought_for_ranks_as_planned(tmp_path):
    """A run without a profile, which went on under a plan for the slow rank, died there."""
    own = load_job(job(tmp_path, {}))
    bound = bind(load_plan(own.plan_path), own.model, own.cluster)
    assert find_remedy(own, bound, None, {}).present_step_seconds == predict(bound).step_seconds


@pytest.mark.parametrize(("asked", "taken"), [("uniform", "uniform"), ("auto", "auto"), ("plan.yaml", "auto")])
def test_a_plan_is_sought_by_the_jobs_strategy(tmp_path, monkeypatch, asked, taken):
    own, sought = load_job(job(tmp_path, {}, plan=asked)), []
    bound, search = bind(load_plan(tmp_path / "plan.yaml"), own.model, own.cluster), planner.plan

    def noted(*given, strategy, **more):
        sought.append(strategy)
        return search(*given, strategy="uniform", **more)

    monkeypatch.setattr(planner, "plan", noted)
    find_remedy(own, bound, None, {})
    assert sought == [taken]


def remedy_of_two_kinds(folder, slow, **constraints):
    """The plan for two T4s and two V100s, of which no stage may hold both, where some are slow; and its accelerators."""
    nodes = [{**NODES[0], "name": name, "accelerator": name} for name in ("T4", "V100-SXM2-32GB")]
    forbidden = {"forbid": [["T4", "V100-SXM2-32GB"]], "pp": 1, "tp": 1, **constraints}
    own = load_job(write_job(folder, cluster={"name": "four", "nodes": nodes}, plan="auto", constraints=forbidden))
    bound = bind(PlanSpec.model_validate(plan(FAST, cluster="four", unused=[0, 1])), own.model, own.cluster)
    (stage,) = find_remedy(own, bound, None, slow).plan.stages
    return {own.cluster.places[rank].accelerator.name for rank in stage.ranks}


def test_what_must_not_share_a_stage_does_not_where_it_is_slow(tmp_path):
    """A slow accelerator has a name of its own: nothing was forbidden of it, and where all were slow the one forbidden
    was not known any more."""
    assert len(remedy_of_two_kinds(tmp_path, {0: 1.5, 1: 1.5})) == 1
    with pytest.raises(BadInput, match="has no plan for cluster"):
        remedy_of_two_kinds(tmp_path, {0: 1.5}, dp=3)  # three replicas are of both


def losses(run):
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def count_trainers(_rank):
    """Has a rank print, at each trainer it builds, how many of the parts of those before are still there."""
    build, earlier = Trainer.__init__, []

    def counted(trainer, *args, **more):
        print(f"built beside {sum(part() is not None for part in earlier)} of {len(earlier)}")
        build(trainer, *args, **more)
        earlier.extend(map(weakref.ref, (trainer, trainer.storage, trainer.optimizer)))

    Trainer.__init__ = counted


@pytest.fixture(scope="module")
def replanned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straggler")
    path = job(folder / "job", {1: 2.0}, replan="auto")
    ended = ranks(2, "train", path, "--run-dir", folder / "run", cwd=folder, hook=count_trainers)
    assert [end.exit_code for end in ended] == [0, 0], ended[0].stderr
    return ended[0], folder / "run"


def test_the_slow_rank_is_reported_with_the_gain(replanned):
    ended, run = replanned
    assert "rank 1 (T4, node 't4') has taken 2.00x its planned time in 2 looked-at steps (3 to 4)" in ended.stdout
    first, second = [json.loads(line) for line in (run / "drift.jsonl").read_text().splitlines()]
    assert (first["rank"], first["factor"]) == (1, pytest.approx(2.0))
    assert first["gain_percent"] > 10
    assert first["kind"] in first["planned_seconds"].keys() == {"forward", "backward", "step"}
    for kind, planned in first["planned_seconds"].items():
        assert first["measured_seconds"][kind] == pytest.approx(2 * planned), kind
    assert second["step"] == 4  # the checkpoint behind which the new plan holds


def test_the_new_plan_gives_the_slow_rank_less(replanned):
    ended, run = replanned
    plan = load_plan(run / "plan.yaml")
    samples = {replica.ranks[0]: replica.samples for replica in plan.stages[0].replicas}
    assert samples[0] > samples.get(1, 0)  # which may be unused
    assert sum(samples.values()) == 16
    assert "goes on under a new plan" in ended.stdout
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["predicted_step_seconds"] != rows[0]["predicted_step_seconds"]
    measured = median(row["step_seconds"] for row in rows[6:])  # 5 and 6 warm up, and those before had another plan
    assert f" {measured:.4g} s " in next(line for line in ended.stdout.splitlines() if "step time" in line)


def test_a_trainer_is_gone_before_the_next_is_built(replanned):
    ended, _ = replanned
    assert "built beside 0 of 6" in ended.stdout  # after the emulation's trial and the plan at the start


def prepares_slowly(rank):
    """Rank 1 warms up for the new plan, and then reads the checkpoint, for longer than ranks wait for a message."""
    load, warmed = CheckpointManager.load, []

    def warm_up(layout, *arguments, **more):
        samples = [replica.samples for stage in layout.plan.stages for replica in stage.replicas]
        print(f"warms up for {samples}")
        if rank == 1 and warmed:
            time.sleep(15)
        warmed.append(samples)

    def slowly(*arguments):
        if rank == 1:
            time.sleep(15)
        return load(*arguments)

    CheckpointManager.load = slowly
    build.compiles_on, build.warm_up = (lambda device: True), warm_up


def test_a_rank_that_warms_up_and_restores_for_long_is_waited_for(tmp_path):
    path = job(tmp_path / "job", {1: 2.0}, replan="auto", communicator={"timeout_seconds": 8})
    ended = ranks(2, "train", path, "--run-dir", tmp_path / "run", cwd=tmp_path, hook=prepares_slowly)
    assert [end.exit_code for end in ended] == [0, 0], ended[0].stderr
    assert "goes on under a new plan" in ended[0].stdout
    plan = load_plan(tmp_path / "run" / "plan.yaml")
    new = [replica.samples for stage in plan.stages for replica in stage.replicas]
    assert [line for line in ended[0].stdout.splitlines() if "warms up for" in line] == [
        "warms up for [8, 8]", f"warms up for {new}",
    ]  # fmt: skip


@pytest.mark.slow
def test_the_loss_goes_on_exactly(replanned, tmp_path):
    path = job(tmp_path / "job", {}, replan="auto")
    ended = ranks(2, "train", path, "--run-dir", tmp_path / "run", cwd=tmp_path)
    assert ended[0].exit_code == 0, ended[0].stderr
    assert not (tmp_path / "run" / "drift.jsonl").exists()  # nobody was slow
    assert losses(replanned[1]) == pytest.approx(losses(tmp_path / "run"), rel=1e-5)


@pytest.mark.slow
def test_nobody_watches_where_the_job_says_never(tmp_path):
    path = job(tmp_path / "job", {1: 2.0}, steps=5, replan="never")  # others are told after the fourth
    ended = ranks(2, "train", path, "--run-dir", tmp_path / "run", cwd=tmp_path)
    assert ended[0].exit_code == 0, ended[0].stderr
    assert "planned time" not in ended[0].stdout
