"""Catalogue, schemas, jobs to start from; tables at 80 columns; speeds that nobody measured."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from hethub.capacity.catalogue import CatalogueSpec, load_catalogue
from hethub.capacity.options import Option, Question
from hethub.capacity.sizing import Sizing
from hethub.cli import command_line, run
from hethub.commands import reference, starting
from hethub.commands.common import planned_for
from hethub.planner.result import RunnerUp
from hethub.predictor.cost.profile import assumed_speeds
from hethub.report import tables
from hethub.report.capacity import print_sizing
from hethub.report.explanation import _runners_up
from hethub.runtime.console import make_console
from hethub.spec.accelerator import catalogue
from hethub.spec.job import JobSpec, load_job
from hethub.spec.plan import PlanSpec, load_plan, save_plan
from tests.support.job_files import plan as plan_dict
from tests.support.job_files import program_plan, write_job, write_yaml

PROJECT = Path(__file__).resolve().parents[2]


def printed(capsys, *arguments):
    assert run(list(map(str, arguments))) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_the_catalogue_shows_all_some_and_one(capsys):
    assert len(json.loads(printed(capsys, "catalogue", "--json"))["accelerators"]) == len(catalogue())
    some = printed(capsys, "catalogue", "h100")
    assert "H100-SXM5-80GB" in some
    assert "MI300X" not in some
    one = printed(capsys, "catalogue", "MI300X")
    assert "memory_gb: 192" in one
    assert "source: " in one


def validator(capsys, kind):
    """What the package jsonschema, which knows nothing of ours, makes of the schema that is printed."""
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema: pip install 'hethub[test]'")
    schema = json.loads(printed(capsys, "schema", kind))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("kind", starting.SCHEMAS)
def test_schemas_take_every_packaged_file_and_no_other(kind, tmp_path, capsys):
    folder = {"catalogue": "catalogues"}.get(kind, f"{kind}s")
    files = sorted((PROJECT / "configs" / folder).glob("*.yaml"))
    if kind == "plan":
        job = load_job(write_job(tmp_path))
        save_plan(load_plan(job.plan_path), tmp_path / "whole.yaml", planned_for(job))
        files = [job.plan_path, tmp_path / "whole.yaml", write_yaml(tmp_path / "hap.yaml", program_plan())]
    assert files
    assert "None" not in printed(capsys, "schema", kind)  # a word of Python's; the files have null
    taken = validator(capsys, kind)
    for file in files:
        content = as_json(file)
        assert list(taken.iter_errors(content)) == [], file
        assert list(taken.iter_errors({**content, "nonsense": 1}))
        for key in taken.schema.get("required", ()):
            assert list(taken.iter_errors({name: value for name, value in content.items() if name != key}))


@pytest.mark.parametrize(
    ("kind", "key", "wrong"),
    [
        ("job", "train", {"steps": "many"}), ("job", "train", {"steps": 0}), ("job", "train", {"precision": "bf17"}),
        ("job", "checkpoint", {"evry": 1}), ("job", "plan", 3), ("cluster", "nodes", []), ("model", "layers", 0),
    ],
)  # fmt: skip
def test_schemas_refuse_what_the_specs_refuse(kind, key, wrong, capsys):
    name = {"job": "laptop-mixed", "cluster": "laptop-mixed", "model": "llama-tiny"}[kind]
    content = as_json(PROJECT / "configs" / f"{kind}s" / f"{name}.yaml")
    assert list(validator(capsys, kind).iter_errors({**content, key: wrong}))


@pytest.mark.parametrize(
    "train", [{"schedule": {"kind": "wsd", "decay_steps": 5}}, {"schedule": {"kind": "cosine"}}, {"betas": [0.9, 0.99]}]
)
def test_schemas_take_every_form_of_a_key_that_the_specs_take(train, capsys):
    content = {**as_json(PROJECT / "configs" / "jobs" / "laptop-mixed.yaml"), "train": train}
    JobSpec.model_validate(content)
    assert list(validator(capsys, "job").iter_errors(content)) == []


def as_json(file):
    """A YAML file as an editor hands it to a schema: keys are text, dates too."""
    return json.loads(json.dumps(yaml.safe_load(file.read_text()), default=str))


def test_comments_of_the_specs_describe_their_keys():
    rows = {key.path: key for key in reference.keys("job")}
    assert rows["constraints.reserve"].text.startswith("of an accelerator's memory")
    assert rows["profile"].default == "`null`"
    assert rows["model"].default == ""
    assert "`bf16`" in rows["train.precision"].type


@pytest.mark.parametrize("kind", reference.FILES)
def test_every_key_says_what_it_is_for(kind):
    silent = [key.path for key in reference.keys(kind) if len(key.text.split()) < 2]
    assert silent == []


@pytest.mark.parametrize("kind", ["laptop", "pretrain"])
def test_init_writes_a_job_that_plans(kind, tmp_path, capsys):
    said = printed(capsys, "init", kind, "--out", tmp_path / "new")
    job = load_job(tmp_path / "new" / "job.yaml", ["constraints.time_limit_seconds=1"])
    assert job.cluster is not None
    assert f"then: hethub launch {job.path}" in said
    assert ("write your nodes into" in said) == (kind == "pretrain")  # no device here: its cluster file is an example
    assert (f"then: hethub doctor {job.path} " in said) == (kind == "pretrain")  # a laptop's job has its text
    commented = "".join(re.findall(r"^# (?=data:|eval:)(.*\n)", job.path.read_text(), re.M))
    given = yaml.safe_load(job.path.read_text()) | yaml.safe_load(commented)
    assert JobSpec.model_validate(given).eval is not None  # what is commented out can be put in
    answer = json.loads(printed(capsys, "plan", job.path, "--set", "constraints.time_limit_seconds=1", "--json"))
    assert answer["fits"]
    assert run(["init", kind, "--out", str(tmp_path / "new")]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err


def test_init_prints_commands_that_can_be_pasted(tmp_path, capsys):
    said = printed(capsys, "init", "laptop", "--out", tmp_path / "my job")
    assert f"then: hethub launch '{tmp_path}/my job/job.yaml'" in said


def test_init_continue_goes_on_from_a_folder(tmp_path, capsys):
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300, "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu",
    }  # fmt: skip
    folder = tmp_path / "it's #2: hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    said = printed(capsys, "init", "continue", "--model", folder, "--out", tmp_path / "new")
    assert f"{folder} has no tokenizer.json" in said  # the job named one, and nobody said that it was not there
    job = load_job(tmp_path / "new" / "job.yaml")
    assert (job.hugging_face_folder, job.spec.data.tokenizer) == (folder, f"{folder}/tokenizer.json")
    assert job.spec.train.seq_len == 128
    assert run(["init", "continue"]) == 2
    assert "--model HF_DIR" in capsys.readouterr().err


def test_a_speed_that_is_assumed_says_nothing_of_a_plan_that_leaves_it_unused(tmp_path, capsys):
    """The same plan without the CPU node had an interval; with it, times were said to be several times off."""
    gpus = {"name": "gpus", "accelerator": "H100-SXM5-80GB", "accelerators": 2}
    cpus = {"name": "cpus", "accelerator": "CPU-core", "accelerators": 2}
    halves = [{"layers": [[0, 4]], "replicas": [{"ranks": [0, 1], "micro_batch": 4, "samples": 8}]}]
    job = write_job(tmp_path, cluster={"nodes": [gpus, cpus]}, plan_file=plan_dict(halves, unused=[2, 3]))
    said = printed(capsys, "predict", job)
    assert "(80 %: " in said
    assert "is assumed" not in said
    assert json.loads(printed(capsys, "predict", job, "--json"))["assumed_speeds"] == []
    cpus["accelerator"] = "H100-SXM5-80GB"
    write_job(tmp_path, cluster={"nodes": [gpus, cpus]}, plan_file=plan_dict(halves, unused=[2, 3]))
    assert re.search("80 %: [^)]+", printed(capsys, "predict", job))[0] in said


def test_a_speed_that_is_assumed_is_said(tmp_path, capsys):
    job = write_job(tmp_path)
    assert "the speed of CPU-core is assumed, not measured" in printed(capsys, "predict", job)
    assert json.loads(printed(capsys, "predict", job, "--json"))["assumed_speeds"] == ["CPU-core"]
    known = load_job(PROJECT / "configs" / "jobs" / "joint-16.yaml").cluster
    assert assumed_speeds(known, "bf16", None) == []
    node = {"name": "cpus", "accelerator": "CPU-core", "accelerators": 8, "count": 4}
    took = {
        "accelerators": 8,
        "tokens_per_second": 9.0,
        "goodput_tokens_per_second": 8.0,
        "days": 2.0,
        "days_interval": (1.5, 2.5),
        "meets": "likely",
    }
    option = Option(nodes={"cpus": 1}, cost=None, energy_kwh=None, on_frontier=True, **took)
    found = Sizing(options=(option,), left_out=(), not_looked_at=0, might_be_better=0)
    print_sizing(found, Question(catalogue=CatalogueSpec(nodes=(node,)), tokens=1e9), None)
    said = capsys.readouterr().out
    assert "the speed of CPU-core is assumed, not measured" in said
    assert "options" not in said
    print_sizing(
        replace(found, options=(option,) * 25), Question(catalogue=CatalogueSpec(nodes=(node,)), tokens=1e9), None
    )
    assert "the first 20 of 25 options; --out and --json have all" in capsys.readouterr().out


def shown_at_80(monkeypatch, capsys, show):
    """What is printed where COLUMNS says 80: no line is longer and nothing is cut."""
    monkeypatch.setenv("COLUMNS", "80")
    show()
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    return text


def words_of(text):
    return set(text.replace(",", " ").split())


def test_tables_of_plans_keep_words_whole_at_80_columns(tmp_path, monkeypatch, capsys):
    job = load_job(write_job(tmp_path))
    plan = load_plan(job.plan_path)
    text = shown_at_80(monkeypatch, capsys, lambda: make_console().print(tables.stage_table(plan, job.cluster)))
    columns = {"stage", "layers", "replicas", "ranks", "accelerator", "micro", "samples", "CPU-core"}
    assert words_of(text) >= {*columns, "ZeRO", "recompute"}
    assert "in every stage: ZeRO 0, recompute none" in text
    small = replace_nodes(job.cluster, "A100-SXM4-80GB", 100)  # long names, ranks of three digits
    stages = [
        {"layers": [[start, start + 2]], "zero": zero, "recompute": "selective", "replicas": [
            {"ranks": [rank], "micro_batch": 1 + zero, "samples": 1} for rank in range(100 * zero, 100 * zero + 100)
        ]} for zero, start in ((0, 0), (1, 2))
    ]  # fmt: skip
    wide = PlanSpec.model_validate({**plan_dict(stages), "global_batch": 100})
    text = shown_at_80(monkeypatch, capsys, lambda: make_console().print(tables.stage_table(wide, small)))
    assert words_of(text) >= {"A100-SXM4-80GB", "100-199", "selective", "recompute"}


def test_a_runner_up_with_the_shorter_step_is_shown_beside_its_mean(tmp_path, monkeypatch, capsys):
    """The mean is what plans are ranked by; one that was too slow to be compared has none, and where none was, no column."""
    plan = load_plan(load_job(write_job(tmp_path)).plan_path)
    runners = [
        RunnerUp(plan=own, step_seconds=seconds, objective_seconds=mean, slower_percent=percent, within_interval=True)
        for own, seconds, mean, percent in (
            (plan, 28.44, 31.36, -5.1),
            (plan, 29.1, None, 2.3),
            (plan.replace(schedule="gpipe"), 32.5, None, 14.3),
        )
    ]

    def text(*own):
        table = _runners_up(SimpleNamespace(runners_up=own))
        return shown_at_80(monkeypatch, capsys, lambda: make_console().print(table))

    words = words_of(text(*runners))
    assert words >= {"28.44", "-5.1", "mean", "31.36", "32.5", "14.3", "yes", "compared"}
    assert "29.1" not in words  # which reads as the one before it
    assert "mean" not in words_of(text(runners[2]))


def replace_nodes(cluster, accelerator, count):
    return cluster.replace(
        nodes=tuple(node.replace(vendor=None, accelerator=accelerator, accelerators=count) for node in cluster.nodes)
    )


def test_the_other_tables_keep_words_whole_at_80_columns(tmp_path, monkeypatch, capsys):
    names = shown_at_80(monkeypatch, capsys, lambda: run(["catalogue"]))
    assert words_of(names) >= set(catalogue())
    priced = load_catalogue(PROJECT / "configs" / "catalogues" / "two-makers.yaml")
    option = Option(
        nodes={priced.nodes[0].name: 16, priced.nodes[1].name: 16}, accelerators=256, tokens_per_second=2_345_678.0,
        goodput_tokens_per_second=2_245_678.0, days=123.4, days_interval=(98.7, 154.3), cost=12_345_678.0,
        energy_kwh=1_234_500.0, meets="likely", on_frontier=True,
    )  # fmt: skip
    found = Sizing(options=(option,), left_out=(), not_looked_at=7, might_be_better=2)
    question = Question(catalogue=priced, tokens=1e12, deadline_days=200.0)
    text = shown_at_80(monkeypatch, capsys, lambda: print_sizing(found, question, None))
    assert words_of(text) >= {"accelerators", "goodput", "meets"}
    assert "2,345,678" in text
    assert "1,234.5" in text  # MWh
    assert "2 of them would be a better answer" in " ".join(text.split())
    row = {
        "operation": "reduce_scatter", "path": "native", "ranks": 1024, "bytes": 67_108_864, "seconds": 12.5,
        "bytes_per_second": 12e9, "bridge_bytes_over_bound": 1.25, "bound_seconds": 2.5, "legs": {"wire": 1.5},
    }  # fmt: skip
    relays = {"near": [(0, "shm")], "far": [(0, "gloo")], "hosts": [[0], [1]]}
    text = shown_at_80(monkeypatch, capsys, lambda: tables.print_communication([row], relays))
    assert words_of(text) >= {"reduce_scatter", "operation", "12500.000", "alone", "2500.000"}
    assert "ms in each leg: wire 1500.00" in " ".join(text.split())


@pytest.mark.parametrize("command", ["hethub", *command_line()[1]])
def test_help_fits_80_columns_and_says_what_every_option_does(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        run([*([] if command == "hethub" else [command]), "--help"])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    if command != "hethub":
        example = text[text.index("example: ") :].removeprefix("example: ").replace("\\\n", " ")
        assert f"hethub {command}" in example  # and can be pasted: a line that goes on says so
        listed = text[
            re.search(r"^(positional arguments|options):", text, re.MULTILINE).start() : text.index("example: ")
        ]
        entries = re.split(r"\n  (?=\S)", listed)[1:]
        assert [entry for entry in entries if not re.search(r"\S\s{2,}\S|\n", entry.strip())] == []


def test_prose_on_a_terminal_breaks_between_words(monkeypatch):
    from hethub.runtime import console

    monkeypatch.setattr(console, "shows_on_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    made = console.make_console()
    made.file = io.StringIO()
    sentence = "a sentence of which no word is as long as forty columns, but the whole is much longer"
    made.print(sentence)
    lines = made.file.getvalue().splitlines()
    assert len(lines) > 1
    assert all(len(line) <= 40 for line in lines)
    assert " ".join(line.strip() for line in lines) == sentence
