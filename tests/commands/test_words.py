"""What the command line says of words that it does not know, and of keys that the command line set."""

import socket
import subprocess
import sys

import pytest

from hethub.cli import run
from hethub.commands.common import a_number
from hethub.spec.errors import BadInput
from tests.support.command import HANG_SECONDS
from tests.support.job_files import plan, write_job
from tests.support.privileges import laid_down


def refused(capsys, *arguments):
    """The one paragraph that a command ends with."""
    assert run(list(map(str, arguments))) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (paragraph,) = printed.err.splitlines()
    return paragraph


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], ["no command 'trian'", "did you mean 'train'?"]),
        ([], ["COMMAND", "hethub --help"]),
        (["plan"], ["JOB.yaml", "hethub plan --help"]),
        (["plan", "job.yaml", "--fast"], ["--fast", "hethub plan --help"]),
        (["train", "job.yaml", "--run-dir", ""], ["--run-dir", "is empty"]),
        (["size", "job.yaml", "--tokens", "many"], ["--tokens many", "1e12, 300B or 1.5T"]),
        (["size", "job.yaml", "--tokens", "-1T"], ["--tokens"]),
        (["size", "job.yaml", "--tokens", "1,5T"], ["--tokens 1,5T", "1.5T"]),  # was 15T
        (["size", "job.yaml", "--tokens", "1T", "--deadline", "soon"], ["--deadline soon", "for example 60."]),
        (["report", "runs/gone"], ["runs/gone: there is no such run folder or plan file"]),
        (["schema", "jobs"], ["jobs", "job", "cluster"]),
        (["catalogue", "H1000"], ["H1000", "did you mean", "H100"]),
    ],
)
def test_a_wrong_word_is_one_paragraph(arguments, words, capsys):
    paragraph = refused(capsys, *arguments)
    assert all(word in paragraph for word in words), paragraph


def test_errors_of_set_speak_of_set_and_not_of_a_line(tmp_path, capsys):
    job = write_job(tmp_path)
    for override, key in (("train.steps=x", "train.steps"), ("train.stpes=4", "train.stpes")):
        paragraph = refused(capsys, "plan", job, "--set", override)
        assert paragraph.startswith(f"hethub: --set {override}: {key} is")
        assert "line" not in paragraph
    paragraph = refused(capsys, "plan", job, "--set", "data={source: jsonl}")
    assert "--set data={source: jsonl}: data" in paragraph
    paragraph = refused(capsys, "plan", job, "--set", "train.min_lr=1")
    assert "line 6, with --set train.min_lr=1: train: min_lr 1.0 exceeds lr" in paragraph
    job.write_text(job.read_text().replace("steps: 4", "steps: x"))
    assert f"{job}, line" in refused(capsys, "plan", job, "--set", "train.seed=3")


@pytest.mark.parametrize(
    ("command", "options", "words"),
    [
        ("plan", ["--out", "job.yaml"], "job.yaml: this is the file to read, and would be overwritten"),
        ("predict", ["--trace", "job.yaml"], "job.yaml: this is the file to read, and would be overwritten"),
        ("report", ["--out", "./job.yaml"], "job.yaml: this is the file to read, and would be overwritten"),
        ("plan", ["--out", "model.yaml"], "model.yaml: this is the file to read, and would be overwritten"),
        ("predict", ["--trace", "cluster.yaml"], "cluster.yaml: this is the file to read, and would be overwritten"),
        ("predict", ["--trace", "plan.yaml"], "plan.yaml: this is the file to read, and would be overwritten"),
        ("size", ["--tokens", "1T", "--out", "model.yaml"], "model.yaml: this is the file to read"),
        ("profile", ["--out", "job.yaml"], "job.yaml: this is the file to read"),
        ("doctor", ["--acceptance", "--out", "cluster.yaml"], "cluster.yaml: this is the file to read"),
        ("report", ["--job", "model.yaml", "--out", "model.yaml"], "model.yaml: this is the file to read"),
        ("predict", ["--profile", "model.yaml", "--trace", "model.yaml"], "model.yaml: this is the file to read"),
        ("plan", ["--out", "new.alone"], "new.alone: a file and a folder of this name are to be written"),
        ("predict", ["--trace", "new", "--alone", "new"], "new: a file and a folder of this name are to be written"),
        ("plan", ["--out", "."], ".: this is a folder, and a file is to be written"),
        ("plan", ["--alone", "model.yaml"], "model.yaml: this is a file, and a folder is to be written"),
        ("init", ["--out", "model.yaml"], "model.yaml: this is a file, and a folder is to be written"),
    ],
)
def test_what_is_written_takes_no_other_things_place(command, options, words, tmp_path, capsys, monkeypatch):
    write_job(tmp_path)
    before = {file: file.read_text() for file in tmp_path.glob("*.yaml")}
    monkeypatch.chdir(tmp_path)
    assert words in refused(capsys, command, "laptop" if command == "init" else "job.yaml", *options)
    assert before == {file: file.read_text() for file in tmp_path.glob("*.yaml")}


def test_what_a_plan_file_is_read_with_is_not_written_over(tmp_path, capsys):
    """A trace took the place of the measurements that it was made from, a page that of the job's cluster."""
    plan = write_job(tmp_path).with_name("plan.yaml")
    for command in (("predict", plan, "--profile"), ("report", plan, "--job")):
        option, out = ("--trace", "model.yaml") if command[0] == "predict" else ("--out", "cluster.yaml")
        given = tmp_path / ("model.yaml" if command[0] == "predict" else "job.yaml")
        before = (tmp_path / out).read_text()
        words = refused(capsys, *command, given, option, tmp_path / out)
        assert f"{out}: this is the file to read, and would be overwritten" in words
        assert (tmp_path / out).read_text() == before


def test_a_report_takes_the_place_of_none_of_a_runs_files(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text("")
    assert "would be overwritten" in refused(capsys, "report", tmp_path, "--out", tmp_path / "metrics.jsonl")


def test_a_file_that_may_not_be_written_is_refused_before_the_work(tmp_path, capsys):
    closed = tmp_path / "closed"
    closed.mkdir(0o500)
    with laid_down():
        assert "may not write there" in refused(capsys, "plan", write_job(tmp_path), "--out", closed / "plan.yaml")
        assert "report.html: this user may not write there" in refused(capsys, "report", closed)


LONG = "n" * 300


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "job.yaml", "--out", LONG],
        ["plan", "job.yaml", "--set", f"model={LONG}"],
        ["report", LONG],
        ["generate", LONG, "hi"],
        ["init", "laptop", "--out", LONG],
    ],
)
def test_a_name_that_no_file_can_have_is_bad_input(arguments, tmp_path, capsys, monkeypatch):
    """Ended with 1, as a failure does."""
    write_job(tmp_path)
    monkeypatch.chdir(tmp_path)
    said = refused(capsys, *arguments)
    assert LONG in said
    assert said.endswith("File name too long. Give a shorter one.")


@pytest.mark.parametrize("command", ["plan", "size"])
def test_a_plan_that_is_neither_strategy_nor_file_is_not_ignored(command, tmp_path, capsys):
    tokens = ["--tokens", "1B"] if command == "size" else []
    paragraph = refused(capsys, command, write_job(tmp_path), "--set", "plan=hethbu", *tokens)
    assert paragraph.startswith("hethub: --set plan=hethbu: plan: ")
    assert "'hethbu' is no strategy" in paragraph
    assert "did you mean 'hethub'?" in paragraph
    assert "'' is no strategy" in refused(capsys, command, write_job(tmp_path), "--set", "plan=''", *tokens)


@pytest.mark.parametrize("command", ["plan", "predict"])
def test_a_constraint_that_cannot_be_kept_is_found_where_it_was_given(command, tmp_path, capsys):
    job = write_job(tmp_path, plan="auto", constraints={"tp": 64})
    line = job.read_text().splitlines().index("  tp: 64") + 1
    assert refused(capsys, command, job).startswith(f"hethub: {job}, line {line}: constraints.tp: 64 contradicts ")
    given = ["--set", "constraints.forbid=[[amd,intel]]"]
    said = refused(capsys, command, job, *given)
    assert said.startswith(f"hethub: --set {given[1]}: constraints.forbid names 'intel'")


def test_an_empty_strategy_is_none(tmp_path, capsys):
    assert "strategy '' is not known" in refused(capsys, "plan", write_job(tmp_path), "--strategy", "")


def test_spaces_around_a_key_that_is_set_are_no_part_of_it(tmp_path, capsys):
    """The key was not known; 'did you mean' itself?"""
    assert "train.seq_len is 999" in refused(capsys, "plan", write_job(tmp_path), "--set", " train.seq_len = 999")


def test_commas_part_thousands_alone():
    assert [a_number("--tokens", text, "1T") for text in ("1,500,000", "1,000.5K", "3e2")] == [1.5e6, 1000.5e3, 300]
    for text in ("1,5T", "1,50", "1,5000", "1,0,0"):
        with pytest.raises(BadInput):
            a_number("--tokens", text, "1T")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "plan.yaml"], "this is a plan file, as its key 'stages' says; name a job file here"),
        (["train", "cluster.yaml"], "this is a cluster file, as its key 'nodes' says; name a job file here"),
        (["plan", "job.yaml", "--set", "cluster=model.yaml"], "this is a model file"),
        (
            ["size", "job.yaml", "--tokens", "1T", "--catalogue", "model.yaml"],
            "this is a model file, as its key 'hidden' says",
        ),
        (["watch", "."], "there is no run here: job.yaml is a job to train; name the folder that train printed"),
        (["diff", "plan.yaml", "job.yaml"], "this is a job file, as its key 'train' says; name a plan file"),
        (["plan", "profile.json"], "this is a profile, as its key 'devices' says; name a job file here"),
    ],
)
def test_a_file_of_another_kind_is_called_what_it_is(arguments, words, tmp_path, capsys, monkeypatch):
    write_job(tmp_path)
    (tmp_path / "profile.json").write_text('{"version": 1, "model": {"layers": 8, "tied_head": false}, "devices": {}}')
    monkeypatch.chdir(tmp_path)
    assert words in refused(capsys, *arguments)


def test_strategies_that_are_known_are_all_named(tmp_path, capsys):
    paragraph = refused(capsys, "plan", write_job(tmp_path), "--strategy", "fastest")
    assert all(name in paragraph for name in ("auto", "exhaustive", "hap", "hethub", "uniform")), paragraph


@pytest.mark.parametrize(
    "speaks",
    [
        "import sys\nfrom hethub.cli import main\nsys.argv[1:] = ['train', 'missing.yaml']\nsys.exit(main())",
        "import time\nfrom hethub.communicator.joining.watch import deadline\nwith deadline(0.1, 3, 'it may'): time.sleep(60)",
    ],
    ids=["a refusal", "a rank that ends itself"],
)
def test_a_paragraph_and_its_line_end_are_one_write(speaks):
    """Ranks share their launcher's pipe: a line in two writes runs into another rank's. Datagrams show each write."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, theirs:
        ended = subprocess.run(
            [sys.executable, "-u", "-c", speaks], stderr=theirs.fileno(), check=False, timeout=HANG_SECONDS
        )
        written = ours.recv(1 << 16, socket.MSG_DONTWAIT)
    assert ended.returncode in (1, 2)
    assert written.startswith(b"hethub: ")
    assert written.endswith(b".\n")


def test_a_strategy_is_blamed_on_the_option_that_names_it(tmp_path, capsys):
    """job.yaml was named, where it does not stand."""
    said = refused(capsys, "plan", write_job(tmp_path), "--strategy", "megatron")
    assert said.startswith("hethub: --strategy 'megatron' is not known; known: auto, ")


def test_state_shares_that_no_rank_can_have_are_refused_as_training_does(tmp_path, capsys):
    """Only `train` did: a rank of two that cut every matrix holds little more than half of the state."""
    ranks = [{"ranks": [0, 1], "micro_batch": 2, "samples": 4}, {"ranks": [2, 3], "micro_batch": 2, "samples": 4}]
    stage = {"layers": [[0, 4]], "replicas": ranks, "zero": 1, "state_shares": {0: 0.8}}
    job = write_job(tmp_path, plan_file=plan([stage]))
    file = job.with_name("plan.yaml")
    for command in (
        ["predict", job],
        ["report", file, "--job", job],
        ["diff", file, file, "--job", job],
        ["launch", job],
    ):
        assert "plan.yaml: stages[0].state_shares: rank 0 is given 0.8" in refused(capsys, *command)
