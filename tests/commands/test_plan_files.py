"""Plan files that stand alone: what they were made for is in them, so any folder will do."""

import json

import pytest
import yaml

from hethub import __version__
from hethub.cli import run
from hethub.report.diff import describe_replicas, describe_stage, diff, side_of_layout
from hethub.runtime.run_folder import RunFolder
from hethub.spec.cluster import ClusterSpec
from hethub.spec.job import load_job
from hethub.spec.layout.bind import bind
from hethub.spec.model import ModelSpec
from hethub.spec.plan import PlannedFor, PlanSpec, ReplicaSpec, StageSpec, load_plan, save_plan
from tests.support.job_files import CLUSTER, MODEL, plan, program_plan, write_job, write_yaml


def answer(capsys, *arguments):
    assert run([*map(str, arguments), "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_a_plan_made_with_set_is_predicted_drawn_and_compared_from_its_file_alone(tmp_path, capsys, monkeypatch):
    job = write_job(tmp_path / "there")
    job.with_name("other.yaml").write_text(
        yaml.safe_dump({**CLUSTER, "name": "faster", "links": {"in_node": {"gbytes_per_second": 20}}})
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    sets = ["--set", "cluster=other.yaml", "--set", "constraints.reserve=0.3", "--set", "plan=auto"]
    made = answer(capsys, "plan", job, *sets, "--out", elsewhere / "plan.yaml", "--alone", elsewhere / "alone")
    for path in (tmp_path / "there").iterdir():
        path.unlink()
    monkeypatch.chdir(elsewhere)
    assert load_plan("plan.yaml").job.reserve == 0.3
    predicted = answer(capsys, "predict", "plan.yaml")
    assert predicted["step_seconds"] == made["step_seconds"]
    assert predicted["fits"] == made["fits"]
    assert run(["report", "plan.yaml"]) == 0
    capsys.readouterr()
    assert "faster" in (elsewhere / "report.html").read_text()
    assert answer(capsys, "diff", "plan.yaml", "plan.yaml")["differences"] == []


def test_a_plan_is_refused_beside_another_batch_or_measurements_of_none_of_its_accelerators(tmp_path, capsys):
    """`predict JOB` refused both; what took the plan file left the profile aside, and the job's batch."""
    file = write_job(tmp_path).with_name("plan.yaml")
    larger = write_job(tmp_path / "larger", train={"global_batch": 16})
    layer = {"micro_batch": 1, "seq_len": 32, "tp": 1, "forward_seconds": 0.1, "backward_seconds": 0.2}
    device = {"accelerator": "CPU-core", "precision": "bf16", "layers": [layer]}
    measured = {"date": "2026-01-01", "hethub": __version__, "software": "test", "model": MODEL, "devices": [device]}
    (tmp_path / "other.json").write_text(json.dumps(measured))
    for given, said in ((("--job", larger), "global_batch 8"), (("--profile", tmp_path / "other.json"), "in bf16")):
        commands = [["report", file], ["diff", file, file], *([["predict", file]] if "--profile" in given else [])]
        for command in commands:
            assert run([*map(str, (*command, *given))]) == 2
            assert said in capsys.readouterr().err


def test_what_was_measured_counts_for_plans_that_are_drawn_and_compared_too(tmp_path, capsys, monkeypatch):
    """By estimates a pipeline was called slower that a slow link, which was measured, made 18 times as fast."""
    monkeypatch.chdir(tmp_path)
    job = write_job(tmp_path)
    layer = {"micro_batch": 1, "seq_len": 32, "tp": 1, "forward_seconds": 0.1, "backward_seconds": 0.2}
    device = {"accelerator": "CPU-core", "precision": "fp32", "layers": [layer]}
    measured = {"date": "2026-01-01", "hethub": __version__, "software": "test", "model": MODEL, "devices": [device]}
    (tmp_path / "measured.json").write_text(json.dumps(measured))
    other = write_yaml(tmp_path / "other.yaml", plan(schedule="gpipe"))
    by_estimates, by_profile = (
        [answer(capsys, "predict", job, "--plan", file, *given)["step_seconds"] for file in ("plan.yaml", other)]
        for given in ((), ("--profile", "measured.json"))
    )
    assert by_profile[0] > 2 * by_estimates[0]
    with_profile = write_yaml(
        tmp_path / "measured.yaml", {**yaml.safe_load(job.read_text()), "profile": "measured.json"}
    )
    for given in (
        ("--job", with_profile),
        ("--job", job, "--profile", "measured.json"),
        ("--profile", "measured.json"),
    ):
        compared = answer(capsys, "diff", "plan.yaml", other, *given)
        assert compared["step_seconds"] == by_profile
        assert compared["assumed_speeds"] == []
        assert run(["report", "plan.yaml", "--out", "report.html", *map(str, given)]) == 0
        capsys.readouterr()
        assert f"{by_profile[0]:.4g} s (80 %" in (tmp_path / "report.html").read_text()
    compared = answer(capsys, "diff", "plan.yaml", other, "--job", job)
    assert (compared["step_seconds"], compared["assumed_speeds"]) == (by_estimates, ["CPU-core"])
    assert run(["diff", "plan.yaml", str(other), "--job", str(job)]) == 0
    assert "the speed of CPU-core is assumed" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["diff", "plan.yaml", "plan.yaml", "--calibrate", "c.csv"], "--calibrate c.csv: it needs the plans' job file"),
        (["diff", "hap.yaml", "plan.yaml", "--profile", "p.json"], "--profile and --calibrate are for plans of layers"),
        (["report", "hap.yaml", "--calibrate", "c.csv"], "--profile and --calibrate are for plans of layers"),
        (["report", ".", "--profile", "p.json"], "--profile p.json: it goes with a plan file"),
    ],
)
def test_measurements_that_nothing_can_be_made_of_are_refused(given, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_job(tmp_path)
    write_yaml(tmp_path / "hap.yaml", program_plan())
    assert run(given) == 2
    assert said in capsys.readouterr().err


def test_plan_says_that_it_leaves_the_jobs_plan_file_aside(tmp_path, capsys):
    job = write_job(tmp_path)
    assert run(["plan", str(job), "--json"]) == 0
    printed = capsys.readouterr()
    assert f"{tmp_path / 'plan.yaml'}, the job's plan, is left aside" in printed.err
    assert f"`hethub predict {job}` predicts it" in printed.err
    assert json.loads(printed.out)["strategy"] == "auto"
    for asked in (["--strategy", "auto"], ["--set", "plan=auto"]):
        assert run(["plan", str(job), "--json", *asked]) == 0
        assert capsys.readouterr().err == ""


def test_plans_are_drawn_and_compared_as_their_jobs_run_them(tmp_path, capsys, monkeypatch):
    """What microbatches run is compiled or not as the job says: `report` of a plan or a run, `diff` and `predict`."""
    monkeypatch.chdir(tmp_path)
    seconds = {}
    for name in ("true", "false"):
        job = write_job(tmp_path / name)
        made = answer(
            capsys, "plan", job, "--set", f"train.compile={name}", "--set", "plan=auto", "--out", f"{name}.yaml"
        )
        seconds[name] = made["step_seconds"]
        assert answer(capsys, "predict", f"{name}.yaml")["step_seconds"] == made["step_seconds"]
    assert seconds["true"] < seconds["false"]
    compared = answer(capsys, "diff", "true.yaml", "false.yaml")
    assert compared["step_seconds"] == [seconds["true"], seconds["false"]]
    assert {"key": "job.compile", "first": "True", "second": "False"} in compared["differences"]
    for what in ("true.yaml", "run"):
        if what == "run":
            given = load_job(job, ["train.compile=true"])
            layout = bind(load_plan("true.yaml"), given.model, given.cluster)
            RunFolder(tmp_path / "run").start(given, layout, {}, {})
        assert run(["report", what, "--out", "report.html"]) == 0
        page = (tmp_path / "report.html").read_text()
        assert [f"step time</td><td>{seconds[name]:.4g} s</td>" in page for name in ("true", "false")] == [True, False]


def test_a_plan_alone_takes_nothing_that_needs_a_job(tmp_path, capsys):
    write_job(tmp_path)
    assert run(["predict", str(tmp_path / "plan.yaml"), "--set", "train.steps=3"]) == 2
    assert "--set needs the job file" in capsys.readouterr().err


def test_a_plan_whose_job_describes_another_model_is_refused(tmp_path):
    job = {"model": {**MODEL, "name": "other"}, "cluster": CLUSTER}
    with pytest.raises(ValueError, match=r"for model 'tiny', but job.model describes 'other'"):
        PlanSpec.model_validate(plan(job=job))


def test_a_run_folders_plan_stands_alone(tmp_path):
    from hethub.runtime.run_folder import RunFolder
    from hethub.spec.job import load_job, load_plan_of

    job = load_job(write_job(tmp_path, constraints={"reserve": 0.2}))
    layout = bind(load_plan_of(job, job.plan_path), job.model, job.cluster)
    RunFolder(tmp_path / "run").start(job, layout, {}, {})
    made_for = load_plan(tmp_path / "run" / "plan.yaml").job
    assert (made_for.model, made_for.cluster, made_for.reserve) == (job.model, job.cluster, 0.2)


MODEL_SPEC = ModelSpec.model_validate({**MODEL, "heads": 8, "kv_heads": 4})
CLUSTER_SPEC = ClusterSpec.model_validate(CLUSTER)
GIVEN = PlanSpec.model_validate(plan([{
    "layers": [[0, 4]], "zero": 1,
    "replicas": [{"ranks": [0, 1], "micro_batch": 2, "samples": 4}, {"ranks": [2, 3], "micro_batch": 2, "samples": 4}],
}]))  # fmt: skip


def changed(**stage):
    return GIVEN.replace(stages=(GIVEN.stages[0].replace(**stage),))


def with_replica(**replica):
    first, second = GIVEN.stages[0].replicas
    return changed(replicas=(first.replace(**replica), second))


CHANGES = {
    "stages[0].zero": changed(zero=2),
    "stages[0].state_shares": changed(state_shares={0: 0.7}),
    "stages[0].recompute": changed(recompute="full"),
    "stages[0].offload": changed(offload=("optimizer",)),
    "stages[0].replicas": [
        with_replica(micro_batch=1), with_replica(in_flight=2), with_replica(tensor_shares=(3.0, 1.0)),
        changed(replicas=tuple(r.replace(ranks=ranks) for r, ranks in zip(GIVEN.stages[0].replicas, ((1, 0), (2, 3)), strict=True))),
    ],
    "schedule": GIVEN.replace(schedule="gpipe"),
    "precision": GIVEN.replace(precision="fp64"),
    "seq_len": GIVEN.replace(seq_len=16),
}  # fmt: skip


def differing(*layouts):
    return diff(*(side_of_layout(layout, None, 0.06) for layout in layouts))


@pytest.mark.parametrize(
    ("key", "other"),
    [(key, other) for key, others in CHANGES.items() for other in (others if isinstance(others, list) else [others])],
)
def test_every_field_of_a_plan_is_compared(key, other):
    compared = differing(bind(GIVEN, MODEL_SPEC, CLUSTER_SPEC), bind(other, MODEL_SPEC, CLUSTER_SPEC))
    assert [difference.key for difference in compared.differences] == [key]
    (difference,) = compared.differences
    assert difference.first != difference.second


def test_ranks_between_a_stages_own_are_not_said_to_be_its():
    """Replicas on ranks 0 and 2 stood as `ranks 0-2`."""
    replicas = [{"ranks": [rank], "micro_batch": 1, "samples": 4} for rank in (0, 2)]
    said = describe_replicas(StageSpec.model_validate({"layers": [[0, 4]], "replicas": replicas}))
    assert said == "2 x TP 1 (ranks 0, 2) with 4 samples in micro-batches of 1"


def test_no_field_of_a_stage_or_replica_is_left_out_of_its_description():
    assert set(describe_stage(GIVEN.stages[0])) == set(StageSpec.model_fields)
    assert set(ReplicaSpec.model_fields) == {"ranks", "micro_batch", "samples", "in_flight", "tensor_shares"}


def test_models_and_clusters_of_two_plans_are_compared_too():
    faster = ClusterSpec.model_validate({**CLUSTER, "links": {"in_node": {"latency_seconds": 1e-6}}})
    compared = differing(bind(GIVEN, MODEL_SPEC, CLUSTER_SPEC), bind(GIVEN, MODEL_SPEC, faster))
    assert "job.cluster.links.in_node.latency_seconds" in [each.key for each in compared.differences]
    deeper = differing(bind(GIVEN, MODEL_SPEC, CLUSTER_SPEC), bind(GIVEN, MODEL_SPEC.replace(ffn=128), CLUSTER_SPEC))
    assert [each.key for each in deeper.differences] == ["job.model.ffn"]


def test_what_one_model_alone_says_makes_models_unlike_and_what_goes_without_saying_does_not():
    """A window was none of the differences that count: a model that attends to 16 tokens was called as fast as one that attends
    to all. As many heads of keys as of queries are the default."""
    plain = MODEL_SPEC.replace(kv_heads=None, head_dim=None)
    said = plain.replace(kv_heads=plain.heads, head_dim=plain.head_size)
    first, same, seen = (bind(GIVEN, own, CLUSTER_SPEC) for own in (plain, said, plain.replace(sliding_window=16)))
    assert differing(first, same).differences == ()
    windowed = differing(first, seen)
    assert [each.key for each in windowed.differences] == ["job.model.sliding_window"]
    assert windowed.unlike_models
    assert windowed.slower_percent is None


def test_a_plan_that_does_not_hold_for_its_cluster_is_named_by_its_file(tmp_path, capsys):
    """`hethub diff` of two did not say which."""
    one, other, job = tmp_path / "one.yaml", tmp_path / "other.yaml", write_job(tmp_path)
    (first, *more) = CLUSTER_SPEC.nodes
    larger = CLUSTER_SPEC.replace(nodes=(first.replace(accelerators=first.accelerators + 1), *more))
    save_plan(GIVEN, one, PlannedFor(model=MODEL_SPEC, cluster=CLUSTER_SPEC))
    save_plan(GIVEN, other, PlannedFor(model=MODEL_SPEC, cluster=larger))
    write_yaml(tmp_path / "plan.yaml", plan(cluster="another"))
    for words, path in (
        (["diff", one, other], other), (["predict", other], other), (["report", other], other),
        (["predict", job], tmp_path / "plan.yaml"),
    ):  # fmt: skip
        assert run([*map(str, words)]) == 2
        assert capsys.readouterr().err.startswith(f"hethub: {path}: the plan ")


def test_a_comparison_says_what_does_not_fit_and_counts_tokens_of_unlike_batches(tmp_path, capsys):
    """Half the batch in half the time was "100 % faster", equal plans "0.0 % faster", and one that does not fit had only its step."""
    save_plan(GIVEN, tmp_path / "one.yaml", PlannedFor(model=MODEL_SPEC, cluster=CLUSTER_SPEC))
    save_plan(GIVEN, tmp_path / "full.yaml", PlannedFor(model=MODEL_SPEC, cluster=CLUSTER_SPEC, reserve=0.9999))
    save_plan(GIVEN.replace(seq_len=16), tmp_path / "short.yaml", PlannedFor(model=MODEL_SPEC, cluster=CLUSTER_SPEC))

    def said(second):
        assert run(["diff", str(tmp_path / "one.yaml"), str(tmp_path / second)]) == 0
        return " ".join(capsys.readouterr().out.split())

    assert "both are as fast" in said("one.yaml")
    assert "does not fit" not in said("one.yaml")
    full = said("full.yaml")
    assert "job.reserve" in full
    assert "the second does not fit: rank 0 (" in full
    compared = answer(capsys, "diff", tmp_path / "one.yaml", tmp_path / "short.yaml")
    one, short = compared["tokens_per_second"]
    assert f"of unlike batches, {one:,.0f} and {short:,.0f} tokens/s: the second is " in said("short.yaml")
    assert ("slower" in said("short.yaml")) == (short < one)
    assert compared["slower_percent"] == pytest.approx(100 * (one / short - 1))  # was of steps, unlike what was said


def test_plans_of_unlike_models_are_not_called_faster_or_slower(tmp_path, capsys):
    for name, model in (("one", MODEL_SPEC), ("wide", MODEL_SPEC.replace(ffn=128))):
        save_plan(GIVEN, tmp_path / f"{name}.yaml", PlannedFor(model=model, cluster=CLUSTER_SPEC))
    words = ["diff", str(tmp_path / "one.yaml"), str(tmp_path / "wide.yaml")]
    assert run(words) == 0
    said = capsys.readouterr().out
    assert "of unlike models: neither is called faster" in said
    assert "of which" not in said
    assert answer(capsys, *words)["slower_percent"] is None


def test_a_plan_is_written_with_what_it_was_made_for_and_read_back(tmp_path):
    job = PlannedFor(model=MODEL_SPEC, cluster=CLUSTER_SPEC, reserve=0.1)
    save_plan(GIVEN, tmp_path / "plan.yaml", job)
    assert load_plan(tmp_path / "plan.yaml") == GIVEN.replace(job=job)


def test_a_plan_of_hap_is_predicted_drawn_and_compared_from_its_file_alone(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_yaml(tmp_path / "hap.yaml", program_plan())
    slower = program_plan(
        predicted_seconds=0.5, ratios={"samples": [0.5, 0.5, 0.0, 0.0]}, parameters={"head.weight": "cut"}
    )
    write_yaml(tmp_path / "slower.yaml", slower)
    predicted = answer(capsys, "predict", "hap.yaml")
    assert predicted["step_seconds"] == 0.25
    assert predicted["tokens_per_second"] == 8 * 32 / 0.25
    whole = CLUSTER_SPEC.places[0].accelerator.memory_bytes  # what the job keeps free is not taken off
    assert [row["limit"] for row in predicted["memory"]] == [whole] * 4
    assert predicted["assumed_speeds"] == ["CPU-core"]
    assert run(["predict", "hap.yaml"]) == 0
    assert "the speed of CPU-core is assumed, not measured" in capsys.readouterr().out
    assert run(["report", "hap.yaml"]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "head.weight" in page
    assert "the speed of CPU-core is assumed, not measured" in page
    assert run(["diff", "hap.yaml", "slower.yaml"]) == 0
    shown = capsys.readouterr().out
    assert "program.ratios.samples" in shown
    assert "the second is 100.0 % slower" in shown
    assert run(["diff", "slower.yaml", "hap.yaml"]) == 0  # "50 % faster" was said of twice the rate
    assert "the second is 100.0 % faster" in capsys.readouterr().out
    compared = answer(capsys, "diff", "hap.yaml", "slower.yaml")
    assert {each["key"] for each in compared["differences"]} == {
        "program.ratios.samples",
        "program.parameters.head.weight",
    }
    assert sum(compared["parts"].values()) == pytest.approx(0.25)
    assert answer(capsys, "diff", "hap.yaml", "hap.yaml")["differences"] == []


def test_a_plan_of_hap_is_compared_with_one_of_layers(tmp_path, capsys):
    job = PlannedFor(model=MODEL_SPEC, cluster=CLUSTER_SPEC)
    save_plan(GIVEN, tmp_path / "layers.yaml", job)
    write_yaml(tmp_path / "hap.yaml", program_plan())
    compared = answer(capsys, "diff", tmp_path / "layers.yaml", tmp_path / "hap.yaml")
    keys = {each["key"]: (each["first"], each["second"]) for each in compared["differences"]}
    assert keys["strategy"] == (None, "hap")
    assert keys["schedule"] == ("1f1b", None)
    assert "global_batch" not in keys
    first, second = compared["step_seconds"]
    assert sum(compared["parts"].values()) == pytest.approx(second - first)


def test_a_program_whose_job_describes_another_cluster_is_refused(tmp_path, capsys):
    content = program_plan()
    content["job"]["cluster"] = {**CLUSTER, "nodes": CLUSTER["nodes"][:1]}
    write_yaml(tmp_path / "hap.yaml", content)
    assert run(["predict", str(tmp_path / "hap.yaml")]) == 2
    paragraph = capsys.readouterr().err
    assert (
        "the program is for 4 ranks of cluster 'two-makers', but job.cluster describes 'two-makers' with 2" in paragraph
    )


def test_a_plan_of_hap_without_job_asks_for_it_or_takes_the_one_given(tmp_path, capsys):
    write_yaml(tmp_path / "hap.yaml", {key: value for key, value in program_plan().items() if key != "job"})
    assert run(["report", str(tmp_path / "hap.yaml"), "--out", str(tmp_path / "page.html")]) == 2
    assert "predict JOB.yaml --plan PLAN.yaml" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()
    job = write_job(tmp_path / "job")
    assert run(["report", str(tmp_path / "hap.yaml"), "--job", str(job), "--out", str(tmp_path / "page.html")]) == 0


def test_a_job_beside_a_run_folder_is_refused(tmp_path, capsys):
    """It was left aside, without a word."""
    job, run_folder = write_job(tmp_path / "job"), tmp_path / "run"
    run_folder.mkdir()
    assert run(["report", str(run_folder), "--job", str(job)]) == 2
    assert f"the run folder {run_folder} says what ran. Leave it out." in capsys.readouterr().err


@pytest.mark.parametrize("command", [["report"], ["diff", "plan.yaml"]])
def test_a_cluster_that_nobody_knows_is_asked_for_where_it_can_be_given(command, tmp_path, monkeypatch, capsys):
    """`--set cluster=FILE` was advised by commands that take no --set."""
    monkeypatch.chdir(tmp_path)
    write_job(tmp_path)
    write_yaml(tmp_path / "detect.yaml", {**yaml.safe_load((tmp_path / "job.yaml").read_text()), "cluster": "detect"})
    assert run([*command, "plan.yaml", "--job", "detect.yaml"]) == 2
    assert (
        "name a cluster file there (with --set cluster=FILE, where the command takes --set)" in capsys.readouterr().err
    )
