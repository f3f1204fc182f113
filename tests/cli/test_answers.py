"""What the commands that do not train give: JSON, traces, token files, Hugging Face folders; and the core without
torch."""

import json
import sys

import pytest
import yaml

from hethub import __version__
from hethub.cli import run
from hethub.spec.job import load_job
from hethub.spec.layout.bind import bind
from hethub.spec.layout.execution import actions
from hethub.spec.plan import load_plan
from tests.support.command import HETHUB, PROJECT, Running, one, ranks
from tests.support.job_files import CLUSTER, MODEL, write_job, write_yaml

PREDICTED = {
    "strategy", "fits", "step_seconds", "step_seconds_interval", "tokens_per_second", "mfu", "percent_of_makers_alone",
    "makers_alone_tokens_per_second", "percent_of_upper_bound",
    "upper_bound_tokens_per_second", "percent_of_ceiling", "breakdown", "memory",
}  # fmt: skip
PLANNED = {"plan", "search_seconds", "candidates", "runners_up", "not_searched"}
LAPTOP = PROJECT / "configs" / "jobs" / "laptop-mixed.yaml"


def refuse_constant(name):
    raise AssertionError(f"{name} is no JSON")


def answer(capsys, *arguments):
    """The one JSON object on stdout, which holds no NaN."""
    assert run([*map(str, arguments), "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    data = json.loads(printed.out, parse_constant=refuse_constant)
    assert isinstance(data, dict)
    return data


def check_prediction(data):
    assert set(data) >= PREDICTED
    low, high = data["step_seconds_interval"]
    assert 0 < low <= data["step_seconds"] <= high
    assert {"compute", "bubble", "tp", "pp", "dp", "optimizer"} <= set(data["breakdown"])
    assert sum(data["breakdown"].values()) == pytest.approx(data["step_seconds"])
    assert 0 < data["percent_of_ceiling"] <= 100.0
    assert data["mfu"] is None  # the peak of CPU-core is assumed
    assert [entry["rank"] for entry in data["memory"]] == list(range(4))
    assert all({"accelerator", "bytes", "limit"} <= set(entry) for entry in data["memory"])


def test_plan_prints_one_json_object_with_the_interfaces_keys(capsys, tmp_path):
    out = tmp_path / "plan.yaml"
    data = answer(capsys, "plan", LAPTOP, "--out", out)
    check_prediction(data)
    assert set(data) >= PLANNED
    guide = (PROJECT / "docs" / "plans.md").read_text()
    assert not [key for key in data if f"`{key}`" not in guide]  # no page said what they are
    assert data["strategy"] == "auto"
    assert data["percent_of_upper_bound"] == data["percent_of_makers_alone"]  # its name until now
    assert data["percent_of_makers_alone"] == pytest.approx(
        100 * data["tokens_per_second"] / data["makers_alone_tokens_per_second"]
    )
    written = yaml.safe_load(out.read_text())
    assert written.pop("job")["cluster"]["name"] == "laptop-mixed"
    assert written == data["plan"]
    again = answer(capsys, "predict", LAPTOP, "--plan", out)
    assert again["step_seconds"] == pytest.approx(data["step_seconds"])
    assert again["percent_of_makers_alone"] is None
    assert again["shortage"] is None
    full = answer(capsys, "predict", LAPTOP, "--plan", out, "--set", "constraints.reserve=0.99")
    assert not full["fits"]
    assert "ranks are over. Most of it is " in full["shortage"]  # only that it does not fit was said
    bounded = answer(capsys, "predict", LAPTOP, "--plan", out, "--bounds")
    assert bounded["percent_of_makers_alone"] == pytest.approx(data["percent_of_makers_alone"])
    rates = [kind["tokens_per_second"] for kind in bounded["kinds_alone"]]
    assert sum(rates) == pytest.approx(data["makers_alone_tokens_per_second"])


def test_every_device_type_alone_is_printed_and_saved_as_a_plan(capsys, tmp_path):
    """Beside the plan; each is a folder that `hethub report` draws without a job."""
    assert run(["plan", str(LAPTOP), "--out", str(tmp_path / "plan.yaml")]) == 0
    printed = capsys.readouterr().out
    saved = sorted((tmp_path / "plan.alone").iterdir())
    assert [folder.name for folder in saved] == ["0-CPU-core-amd", "1-CPU-core-nvidia"]
    assert printed.count("alone: 2 x CPU-core") == 2
    assert "1-CPU-core-nvidia" in printed
    for folder in saved:
        assert run(["report", str(folder / "plan.yaml"), "--out", str(folder / "report.html")]) == 0
    again = ["predict", str(LAPTOP), "--plan", str(tmp_path / "plan.yaml"), "--alone", str(tmp_path / "again")]
    assert run(again) == 0
    assert (tmp_path / "again" / "0-CPU-core-amd" / "plan.yaml").read_text() == (saved[0] / "plan.yaml").read_text()


def test_a_device_type_alone_is_predicted_from_its_file_as_it_was_planned(capsys, tmp_path):
    """What the job compiles and keeps free was not in the file: H200s of joint-16 were then said to be 17 % faster."""
    sets = ["--set", "train.compile=true", "--set", "constraints.reserve=0.3"]
    found = answer(capsys, "plan", LAPTOP, *sets, "--alone", tmp_path / "alone")
    for folder, planned in zip(sorted((tmp_path / "alone").iterdir()), found["kinds_alone"], strict=True):
        assert load_plan(folder / "plan.yaml").job.reserve == 0.3
        assert answer(capsys, "predict", folder / "plan.yaml")["tokens_per_second"] == planned["tokens_per_second"]


def test_a_reader_that_has_seen_enough_is_told_nothing(tmp_path):
    """`hethub predict … | head -c 1`"""
    job = write_job(tmp_path / "job")
    line = f"{sys.executable} -m hethub predict {job} --json | head -c 1"
    ended = Running(["/bin/sh", "-c", line], tmp_path, {}).end()
    assert (ended.stdout, ended.stderr) == ("{", "")


@pytest.mark.parametrize(("arguments", "code"), [("catalogue", 0), ("catalogue Z", 2)])
def test_streams_that_are_closed_are_told_nothing(arguments, code, tmp_path):
    line = f"{sys.executable} -m hethub {arguments} >&- 2>closed; echo $? >>closed; exec {sys.executable} -m hethub {arguments} >&- 2>&-"
    ended = Running(["/bin/sh", "-c", line], tmp_path, {}).end()
    assert (ended.exit_code, ended.stdout, ended.stderr) == (code, "", "")
    *said, first = (tmp_path / "closed").read_text().splitlines()
    assert (int(first), len(said)) == (code, code // 2)


def test_an_encoding_without_arrows_is_no_error(tmp_path):
    """As of a terminal under LANG=de_DE: the summary of a run that was done ended in a traceback."""
    words = [sys.executable, "-m", "hethub", "bench", "--help"]
    ended = Running(words, tmp_path, {"PYTHONIOENCODING": "latin-1"}).end()
    assert (ended.exit_code, ended.stderr) == (0, "")
    assert "BYTES,?" in ended.stdout


def test_predict_prints_one_json_object_with_the_interfaces_keys(capsys):
    data = answer(capsys, "predict", LAPTOP)
    check_prediction(data)
    assert data["percent_of_makers_alone"] is not None


def test_predict_writes_a_trace_of_the_schedule(capsys, tmp_path):
    job, trace = write_job(tmp_path / "job"), tmp_path / "trace.json"
    read = load_job(job)
    layout = bind(load_plan(tmp_path / "job" / "plan.yaml"), read.model, read.cluster)
    assert run(["predict", str(job), "--trace", str(trace)]) == 0
    assert "a step" in capsys.readouterr().out
    events = json.loads(trace.read_text(), parse_constant=refuse_constant)["traceEvents"]
    for assignment in layout.assignments:
        own = [event for event in events if event["ph"] == "X" and event["pid"] == assignment.rank]
        planned = [action.name for action in actions(layout, assignment.stage, assignment.replica)]
        assert [event["name"] for event in sorted(own, key=lambda event: event["ts"])] == planned


def test_tables_in_a_pipe_are_whole(capsys, tmp_path):
    """Nothing is cut to the width of a terminal that is not there."""
    assert run(["plan", str(write_job(tmp_path / "job", plan="auto"))]) == 0
    printed = capsys.readouterr().out
    assert "accelerator" in printed
    assert "…" not in printed
    assert "\x1b" not in printed


def test_a_negative_number_of_runners_up_is_refused(capsys):
    assert run(["plan", str(LAPTOP), "--top", "-1"]) == 2
    assert "--top -1: give" in capsys.readouterr().err


def test_a_batch_beyond_counting_is_refused(capsys):
    assert run(["plan", str(LAPTOP), "--set", "train.global_batch=100000000"]) == 2
    assert "train.global_batch is 100000000, but" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "predict"])
def test_a_cluster_that_only_ranks_can_find_is_refused(command, capsys, tmp_path):
    job = write_job(tmp_path / "job", cluster_name="detect", plan="auto")
    assert run([command, str(job)]) == 2
    assert "`detect`" in capsys.readouterr().err


def test_predict_refuses_a_plan_for_another_batch(capsys, tmp_path):
    job = write_job(tmp_path / "job", train={"global_batch": 16})
    assert run(["predict", str(job)]) == 2
    assert "global_batch 8" in capsys.readouterr().err


def test_tokens_made_once_are_trained_on_like_the_text(tmp_path):
    job = write_job(tmp_path / "job", cluster_name="detect", plan="auto", train={"steps": 2})
    assert (
        run(
            [
                "tokenise",
                str(tmp_path / "job" / "text.txt"),
                "--tokenizer",
                "bytes",
                "--out",
                str(tmp_path / "text.bin"),
            ]
        )
        == 0
    )
    content = yaml.safe_load(job.read_text())
    tokens = write_yaml(
        tmp_path / "job" / "tokens.yaml", {**content, "data": {"source": "tokens", "path": "../text.bin"}}
    )
    losses = []
    for name, path in (("a", job), ("b", tokens)):
        ended = one(ranks(1, "train", path, "--run-dir", tmp_path / name, cwd=tmp_path))
        assert ended.exit_code == 0, ended.stderr
        losses.append(
            [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        )
    assert losses[0] == losses[1]


def test_an_exported_run_is_a_model_for_transformers(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'hethub[test]'")
    job, run, to = write_job(tmp_path / "job"), tmp_path / "run", tmp_path / "llama"
    assert [ended.exit_code for ended in ranks(4, "train", job, "--run-dir", run, cwd=tmp_path)] == [0] * 4
    ended = one(ranks(1, "export", run, "--to", to, cwd=tmp_path))
    assert (ended.exit_code, ended.stdout) == (0, f"exported step 4 of {run} to {to}\n")
    model, report = transformers.LlamaForCausalLM.from_pretrained(to, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    text = torch.tensor([list((tmp_path / "job" / "text.txt").read_bytes()[:32])])
    trained = model(input_ids=text, labels=text).loss.item()
    assert trained < json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["loss"]


def test_export_does_not_write_over_anything(tmp_path):
    ended = one(ranks(1, "export", tmp_path, "--to", tmp_path / "llama", cwd=tmp_path))
    assert ended.exit_code == 2
    assert "no run with checkpoints" in ended.stderr


# -- without torch -----------------------------------------------------------------------------------------------------

WITHOUT_TORCH = """
import importlib.util
import sys


class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Hidden())
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "torch" else find_spec(name, package)
"""


@pytest.fixture
def light(tmp_path):
    """`hethub …` in a process that has no torch."""
    (tmp_path / "hide").mkdir()
    (tmp_path / "hide" / "sitecustomize.py").write_text(WITHOUT_TORCH)

    def run(*arguments):
        return Running([HETHUB, *arguments], tmp_path, {"PYTHONPATH": str(tmp_path / "hide")}).end()

    return run


def test_plan_and_predict_and_tokenise_run_without_torch(light, tmp_path):
    job = write_job(tmp_path / "job")
    for arguments in (
        ["predict", job, "--json"],
        ["plan", job, "--json"],
        ["tokenise", tmp_path / "job" / "text.txt", "--tokenizer", "bytes", "--out", tmp_path / "text.bin"],
    ):
        ended = light(*arguments)
        assert ended.exit_code == 0, ended.stderr


@pytest.mark.parametrize("arguments", [["train", "job.yaml"], ["export", "run", "--to", "llama"]])
def test_without_torch_what_needs_it_names_what_to_install(light, arguments):
    ended = light(*arguments)
    assert ended.exit_code == 2
    (paragraph,) = ended.paragraphs
    assert f"hethub {arguments[0]} needs torch" in paragraph
    assert "pip install 'hethub[train]'" in paragraph


def test_help_of_every_command_has_an_example(light, capsys):
    ended = light("--help")
    assert ended.exit_code == 0
    for command in ("train", "plan", "predict", "tokenise", "export"):
        assert command in ended.stdout
        with pytest.raises(SystemExit) as done:
            run([command, "--help"])
        assert done.value.code == 0
        assert "example: " in capsys.readouterr().out


def test_no_command_is_imported_with_torch_but_those_that_need_it():
    """The parser alone pulls in none of the heavy libraries."""
    heavy = {"torch", "scipy", "transformers", "pydantic"}
    ended = Running(
        [sys.executable, "-c", "import sys, hethub.cli; print([n for n in sys.argv[1:] if n in sys.modules])", *heavy],
        PROJECT, {},
    ).end()  # fmt: skip
    assert ended.stdout.strip() == "[]"


def test_what_was_measured_is_called_assumed_neither_by_plan_nor_by_size(tmp_path, capsys):
    """size, whose answer rests on the job's profile as plan's does, called the same accelerators assumed."""
    job = write_job(tmp_path, plan="auto", profile="measured.json")
    layer = {"micro_batch": 1, "seq_len": 32, "tp": 1, "forward_seconds": 0.1, "backward_seconds": 0.2}
    device = {"accelerator": "CPU-core", "precision": "fp32", "layers": [layer]}
    measured = {"date": "2026-01-01", "hethub": __version__, "software": "test", "model": MODEL, "devices": [device]}
    (tmp_path / "measured.json").write_text(json.dumps(measured))
    nodes = write_yaml(tmp_path / "nodes.yaml", {"nodes": [{**CLUSTER["nodes"][0], "count": 2}]})
    asked = ("size", job, "--tokens", "1e6", "--catalogue", nodes)
    assert answer(capsys, "plan", job)["assumed_speeds"] == answer(capsys, *asked)["assumed_speeds"] == []
    assert run([*map(str, asked), "--out", str(tmp_path / "size.html")]) == 0
    assert "CPU-core is assumed" not in capsys.readouterr().out + (tmp_path / "size.html").read_text()
    assert answer(capsys, *asked, "--set", "profile=null")["assumed_speeds"] == ["CPU-core"]
