"""`hethub launch` starts a job for real; while it runs, its ranks listen on loopback only."""

import json
import os

import pytest

import hethub
from hethub.cli import run
from hethub.runtime.launch import launcher_command
from hethub.runtime.run_folder import RunFolder
from tests.support.command import AS_ROOT, HANG_SECONDS, HETHUB, Running, needs_mpirun
from tests.support.hosts.sockets import listening_addresses
from tests.support.job_files import MODEL, plan, write_job, write_pair_job, write_yaml

MANY_STEPS = {"steps": 100_000}
GPT = "--set model=gpt.yaml: model 'tiny' is of family gpt; "


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [pytest.param("mpirun", marks=needs_mpirun), "torchrun"])
def test_launch_runs_the_job_over_loopback_only(tmp_path, launcher):
    job, run = write_pair_job(tmp_path, train=MANY_STEPS), tmp_path / "run"
    command = [HETHUB, "launch", job, "--with", launcher, "--run-dir", run]
    running = Running(command, tmp_path, {**AS_ROOT, "PYTHONWARNINGS": "ignore"})
    try:
        running.wait_until(lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size > 0)
        found = {rank: listening_addresses(running.rank_pid(rank)) for rank in range(2)}
    finally:
        running.kill()
    assert set().union(*found.values()) == {"127.0.0.1"}, found


def test_launch_hands_on_what_was_asked(tmp_path):
    job = write_job(tmp_path)
    (tmp_path / "run").mkdir()
    layer = {"micro_batch": 1, "seq_len": 32, "tp": 1, "forward_seconds": 0.1, "backward_seconds": 0.2}
    device = {"accelerator": "CPU-core", "precision": "fp32", "layers": [layer]}
    measured = {
        "date": "2026-01-01",
        "hethub": hethub.__version__,
        "software": "test",
        "model": MODEL,
        "devices": [device],
    }
    (tmp_path / "measured.json").write_text(json.dumps(measured))
    command = [HETHUB, "launch", job, "--dry-run", "--set", "train.steps=7", "--resume", "run", "--plan", "plan.yaml"]
    command += ["--profile", "measured.json", "--accept-changes"]
    ended = Running(command, tmp_path, {}).end()
    assert ended.exit_code == 0, ended.stderr
    assert "--set train.steps=7 --plan plan.yaml --profile measured.json --resume run --accept-changes" in ended.stdout


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--plan", "nope.yaml"], "nope.yaml: there is no such plan file. "),
        (["--set", "plan=nope.yaml"], "there is no such plan file, and 'nope.yaml' is no strategy"),
        (["--plan", "job.yaml"], "job.yaml: this is a job file"),
        (["--plan", "elsewhere.yaml"], "elsewhere.yaml: the plan was made for cluster 'elsewhere'"),
        (["--set", "train.global_batch=16"], "plan.yaml: the plan was made for global_batch 8"),
        (["--profile", "nope.json"], "nope.json: there is no such profile"),
        (["--resume", "nope"], "nope: there is no run to resume here"),
        (["--set", "cluster=home.yaml"], "home.yaml, line 7: nodes[0].environment: '~/cuda' is taken as it stands"),
        (["--set", "cluster=near.yaml"], "near.yaml, line 7: nodes[0].environment: 'cuda' is taken as it stands"),
        (
            ["--set", "cluster=gaudi.yaml", "--set", "plan=auto"],
            "gaudi.yaml: hethub starts a rank on every accelerator, used or not, and none on intel; leave these nodes out ",
        ),
        (["--set", "cluster=many.yaml", "--set", "plan=auto"], "many.yaml: node 'rack' stands for 2 machines"),
        (
            ["--resume", "a", "--run-dir", "b"],
            "--resume names the run folder already, in which the run goes on; leave out --run-dir",
        ),
        (
            ["--set", "model=gpt.yaml"],
            GPT + "hethub plans and predicts it, but trains only llama. Choose a model of that family.",
        ),
        (
            ["--set", "model=gpt.yaml", "--set", "plan=hap"],
            GPT + "strategy 'hap' knows the code of llama only. Give other models",
        ),
        (
            ["--set", "model=plain.yaml"],
            "model 'tiny' has gated: false; hethub plans and predicts it, but the MLP that it",
        ),
        (["--set", "model=plain.yaml", "--set", "plan=hap"], "model 'tiny' has gated: false; "),
    ],
)
def test_what_a_job_cannot_run_is_refused_before_it_is_launched(given, said, tmp_path, monkeypatch, capsys):
    """A dry run printed the command, and without one every node's ranks were started to say so."""
    monkeypatch.chdir(tmp_path)
    write_job(tmp_path)
    write_yaml(tmp_path / "elsewhere.yaml", plan(cluster="elsewhere"))
    nodes = [{"name": "rack", "count": 2, "accelerator": "MI300X", "accelerators": 8}]
    for name, environment in (("home", "~/cuda"), ("near", "cuda")):
        write_yaml(tmp_path / f"{name}.yaml", {"name": name, "nodes": [{**nodes[0], "environment": environment}]})
    gaudi = {"name": "g", "accelerator": "Gaudi2", "accelerators": 8}
    write_yaml(tmp_path / "gaudi.yaml", {"name": "gaudi", "nodes": [{**nodes[0], "hosts": ["a", "b"]}, gaudi]})
    write_yaml(tmp_path / "many.yaml", {"name": "many", "nodes": nodes})
    write_yaml(tmp_path / "gpt.yaml", {**MODEL, "family": "gpt"})
    write_yaml(tmp_path / "plain.yaml", {**MODEL, "gated": False})
    assert run(["launch", "job.yaml", "--dry-run", *given]) == 2
    told = capsys.readouterr()
    assert said in told.err
    assert told.out == ""


def test_accelerators_that_are_emulated_are_launched_whoever_makes_them(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_job(tmp_path)
    gaudi = {"name": "g", "accelerator": "Gaudi2", "accelerators": 2}
    write_yaml(tmp_path / "gaudi.yaml", {"name": "gaudi", "emulated": True, "nodes": [gaudi]})
    assert run(["launch", "job.yaml", "--dry-run", "--set", "cluster=gaudi.yaml", "--set", "plan=auto"]) == 0
    assert " -n 2 " in capsys.readouterr().out


@needs_mpirun
def test_launch_ends_as_ranks_do_that_were_given_bad_input(tmp_path):
    job = write_pair_job(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    command = [HETHUB, "launch", job, "--resume", "run"]
    ended = Running(command, tmp_path, {}).end(HANG_SECONDS)
    assert ended.exit_code == 2, ended.stderr
    assert "there is no run to resume here" in ended.stderr
    assert "ended with exit code" not in ended.stderr


@pytest.mark.parametrize(
    ("launcher", "ended", "by_itself", "alone"),
    [
        ("mpirun", (0, False), 75, 1),  # as Open MPI ends where signals have killed all ranks
        ("mpirun", (0, True), 1, 1),  # before there was anything to save
        ("mpirun", (-9, False), 75, 1),
        ("srun", (137, False), 75, 1),
        ("mpirun", (255, False), 1, 1),  # a host that it does not reach
        ("torchrun", (1, False), 1, 1),
        ("srun", (75, False), 75, 75),
        ("srun", (3, True), 3, 3),
    ],
)
def test_a_job_that_was_killed_is_worth_starting_again_under_resume_auto(
    launcher, ended, by_itself, alone, tmp_path, monkeypatch
):
    """It ended with 1, behind which nothing starts a job again, though the next start would have gone on."""
    monkeypatch.chdir(tmp_path)
    write_pair_job(tmp_path)
    monkeypatch.setattr(launcher_command, "run_here", lambda _: ended)
    command = ["launch", "job.yaml", "--with", launcher]
    assert run([*command, "--resume", "auto"]) == by_itself
    assert run(command) == alone


@needs_mpirun
def test_a_run_that_has_come_to_its_end_is_no_job_that_was_killed(tmp_path):
    """Whose ranks had nothing left to train were taken for killed: under --resume auto with 75, as which it is started again
    without end."""
    job = write_pair_job(tmp_path)
    for already in (False, True):
        ended = Running([HETHUB, "launch", job, "--resume", "auto"], tmp_path, AS_ROOT).end(HANG_SECONDS)
        assert ended.exit_code == 0, ended.stderr
        assert ("steps are trained already" in ended.stdout) == already


def test_a_run_that_has_nothing_left_to_train_has_not_been_killed(tmp_path, monkeypatch, capsys):
    """Its start wrote a log and no metrics, and ended with 75: a batch script would have started it again for ever."""
    monkeypatch.chdir(tmp_path)
    write_pair_job(tmp_path)
    found = RunFolder(tmp_path / "runs" / "job-20260101-120000")
    found.path.mkdir(parents=True)
    found.log("step 4/4")
    found.metrics.write_text(json.dumps({"step": 4, "loss": 3.0, "step_seconds": 0.1}) + "\n")
    os.utime(found.path / "log.txt", (0, 0))

    def nothing_left(_: object) -> tuple[int, bool]:
        found.log("all 4 steps are trained already; raise train.steps to go on")
        return 0, False

    monkeypatch.setattr(launcher_command, "run_here", nothing_left)
    assert run(["launch", "job.yaml", "--resume", "auto"]) == 0
    assert run(["launch", "job.yaml", "--resume", "auto", "--set", "train.steps=5"]) == 75
    monkeypatch.setattr(launcher_command, "run_here", lambda _: (0, False))  # killed before it wrote anything
    assert run(["launch", "job.yaml", "--resume", "auto"]) == 75
    assert capsys.readouterr().err.count("ended before its last step") == 2


def test_a_launcher_that_is_not_here_is_refused(tmp_path):
    ended = Running([HETHUB, "launch", write_pair_job(tmp_path), "--with", "srun"], tmp_path, {"PATH": ""}).end()
    assert ended.exit_code == 2
    assert "srun: there is no such program here" in ended.stderr
