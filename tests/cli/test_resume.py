"""Going on after an end: the same numbers, under any plan, after a signal, after damage."""

import json
import os
import shutil
import signal

import pytest

from tests.support.command import check_refused, needs_mpirun, one, ranks, start_mpirun, start_torchrun
from tests.support.job_files import OTHER_STAGES, plan, program_plan, write_job, write_pair_job, write_yaml

STEPS = 6


def losses(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]


def exported(run, to):
    ended = one(ranks(1, "export", run, "--to", to, cwd=run.parent))
    assert ended.exit_code == 0, ended.stderr
    return (to / "model.safetensors").read_bytes()


def cut_back(run, copy, step):
    """A copy of the run as it was when `step` had just been saved, and the steps behind it not yet."""
    shutil.copytree(run, copy)
    for checkpoint in (copy / "checkpoints").iterdir():
        if int(checkpoint.name.removeprefix("step-")) > step:
            shutil.rmtree(checkpoint)
    return copy


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A job and its whole run of 6 steps, saved at 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("resume")
    job = write_job(folder / "job", train={"steps": STEPS}, checkpoint={"every_steps": 2, "keep": 3})
    for ended in ranks(4, "train", job, "--run-dir", folder / "whole", cwd=folder):
        assert ended.exit_code == 0, ended.stderr
    return job, folder / "whole"


def resume(job, run, *arguments, size=4):
    results = ranks(size, "train", job, "--resume", run, *arguments, cwd=job.parent.parent)
    for ended in results:
        assert ended.exit_code == 0, ended.stderr
    return results[0]


def test_a_resumed_run_communicates_over_the_relays_it_began_with(uninterrupted, tmp_path):
    job, whole = uninterrupted
    run = cut_back(whole, tmp_path / "run", 4)
    record = json.loads((run / "communicator.json").read_text())
    assert record["relays"] == {"near": [[0, "shm"]], "far": [[0, "gloo"]], "hosts": [[0, 1, 2, 3]]}
    record["relays"]["near"] = [[0, "gloo"]]
    (run / "communicator.json").write_text(json.dumps(record))
    resume(job, run)
    assert losses(run) == losses(whole)
    assert json.loads((run / "communicator.json").read_text())["relays"] == record["relays"]


def test_every_step_says_what_it_communicated(uninterrupted):
    _, whole = uninterrupted
    steps = [json.loads(line)["communication"] for line in (whole / "metrics.jsonl").read_text().splitlines()]
    sent = [sum(link["bytes"] for link in step["links"] if link["level"] == "bridge") for step in steps]
    assert sent[1] > 0
    assert len(set(sent[1:])) == 1  # the steps are alike
    for step in steps:
        assert all(row["calls"] > 0 and row["seconds"] >= 0 for row in step["operations"])


def test_under_the_same_plan_every_bit_is_the_same(uninterrupted, tmp_path):
    job, whole = uninterrupted
    run = cut_back(whole, tmp_path / "run", 2)
    assert "resumed behind step 2" in resume(job, run).stdout
    assert losses(run) == losses(whole)
    assert exported(run, tmp_path / "a") == exported(whole, tmp_path / "b")


def test_under_another_plan_the_losses_go_on(uninterrupted, tmp_path):
    job, whole = uninterrupted
    run = cut_back(whole, tmp_path / "run", 2)
    resume(job, run, "--plan", write_yaml(tmp_path / "other.yaml", plan(OTHER_STAGES)))
    assert losses(run) == pytest.approx(losses(whole), rel=1e-5)


def test_on_fewer_ranks_a_plan_is_found_again(uninterrupted, tmp_path):
    job, whole = uninterrupted
    run = cut_back(whole, tmp_path / "run", 4)
    resume(job, run, "--set", "cluster=detect", "--set", "plan=auto", size=2)
    assert losses(run) == pytest.approx(losses(whole), rel=1e-5)


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(uninterrupted, tmp_path):
    job, whole = uninterrupted
    run = cut_back(whole, tmp_path / "run", 4)
    damaged = run / "checkpoints" / "step-4" / "__3_0.distcp"
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    results = ranks(4, "train", job, "--resume", run, cwd=tmp_path)
    assert [ended.exit_code for ended in results] == [0] * 4
    named, moved = [line for ended in results for line in ended.paragraphs]
    assert "step-4" in named
    assert "__3_0.distcp" in named
    assert "step-4.set-aside" in moved
    assert "resumed behind step 2" in results[0].stdout
    assert losses(run) == losses(whole)


def test_with_every_checkpoint_damaged_all_are_named(uninterrupted, tmp_path):
    job, whole = uninterrupted
    run = cut_back(whole, tmp_path / "run", 4)
    for step in (2, 4):
        (run / "checkpoints" / f"step-{step}" / "COMPLETE").unlink()
    results = ranks(4, "train", job, "--resume", run, cwd=tmp_path)
    assert [ended.exit_code for ended in results] == [2] * 4
    assert all(not ended.paragraphs for ended in results[1:])
    assert "step-2" in results[0].paragraphs[-1]
    assert "step-4" in results[0].paragraphs[-1]


@pytest.mark.parametrize("named", [["--set", "plan=auto"], ["--plan", "plan.yaml"]])
def test_a_run_of_strategy_hap_under_another_plan_is_refused_by_that_name(uninterrupted, tmp_path, named):
    """Twelve keys of its plan file were called unknown or missing; with a plan named an earlier version was blamed."""
    job, whole = uninterrupted
    run = cut_back(whole, tmp_path / "run", 4)
    write_yaml(run / "plan.yaml", program_plan())
    write_yaml(tmp_path / "plan.yaml", plan())
    results = ranks(4, "train", job, *named, "--resume", run, cwd=tmp_path)
    check_refused(results, "the run here is of strategy hap", "--set plan=hap")


def test_a_finished_run_says_that_nothing_is_left(uninterrupted, tmp_path):
    job, whole = uninterrupted
    run = cut_back(whole, tmp_path / "run", STEPS)
    ended = resume(job, run)
    assert f"all {STEPS} steps are trained already; raise train.steps" in ended.stdout
    assert losses(run) == losses(whole)
    assert (run / "trace.json").read_bytes() == (whole / "trace.json").read_bytes()


def test_where_nothing_is_trained_behind_a_named_step_what_lies_behind_it_stays(uninterrupted, tmp_path):
    """Its lines of metrics were gone, and its checkpoint set aside."""
    job, whole = uninterrupted
    run = cut_back(whole, tmp_path / "run", STEPS)
    ended = resume(job, run / "checkpoints" / "step-4", "--set", "train.steps=4")
    assert "all 4 steps are trained already" in ended.stdout
    assert losses(run) == losses(whole)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-2", "step-4", "step-6"]


@pytest.mark.parametrize("left", ["its plan", "a plan of hap", "a damaged plan"])
def test_a_run_cut_off_before_its_first_checkpoint_begins_again_with_another_model(uninterrupted, tmp_path, left):
    """The plan that it left was taken, and refused: it was made for the model of before."""
    _, whole = uninterrupted
    run = cut_back(whole, tmp_path / "run", 0)
    (run / "owner.json").write_text("{}")
    if left != "its plan":
        write_yaml(run / "plan.yaml", program_plan() if left == "a plan of hap" else {"version": 1})
    job = write_job(tmp_path / "job", model={"name": "another", "layers": 3}, plan="auto", train={"steps": 2})
    begun = resume(job, run)
    assert "it begins again at step 1" in begun.stdout
    assert len(losses(run)) == 2


def trained(run, step):
    path = run / "metrics.jsonl"
    return path.exists() and len(path.read_text().splitlines()) >= step


def stop_and_go_on(running, job, run, send, code=3, said=()):
    """Sends the signal after step 3, then trains two steps more from what was saved."""
    running.wait_until(lambda: trained(run, 3))
    send()
    ended = running.end()
    assert ended.exit_code == code, ended.stderr
    assert ended.paragraphs == list(said)
    last = len(losses(run))
    assert 3 <= last < 1000
    assert (run / "checkpoints" / f"step-{last}" / "COMPLETE").exists()
    assert f"stopped on request at step {last}; continue with --resume {run}" in ended.stdout
    assert f"resumed behind step {last}" in resume(job, run, "--set", f"train.steps={last + 2}", size=2).stdout
    assert len(losses(run)) == last + 2


@pytest.mark.slow
@needs_mpirun
def test_sigusr1_to_mpirun_saves_and_exits(tmp_path):
    job, run = write_pair_job(tmp_path / "job", train={"steps": 1000}), tmp_path / "run"
    running = start_mpirun(2, "train", job, "--run-dir", run, "--set", "checkpoint.every_steps=null", cwd=tmp_path)
    said = ["hethub: stopping behind this step, with a checkpoint; Ctrl-C again ends at once, without one"]
    stop_and_go_on(running, job, run, lambda: running.process.send_signal(signal.SIGUSR1), said=said)


def test_sigterm_to_one_rank_under_torchrun_saves_and_exits(tmp_path):
    """Started as `torchrun -m hethub`."""
    job, run = write_pair_job(tmp_path / "job", train={"steps": 1000}), tmp_path / "run"
    running = start_torchrun(2, "train", job, "--run-dir", run, "--set", "checkpoint.every_steps=null", cwd=tmp_path)
    stop_and_go_on(running, job, run, lambda: os.kill(running.rank_pid(1), signal.SIGTERM), code=1)  # torchrun's own


def test_a_wish_to_stop_in_the_last_step_changes_nothing(tmp_path):
    """All is trained: 3 would have a scheduler start it again."""
    job = write_pair_job(tmp_path / "job", train={"steps": 2})
    for ended in ranks(2, "train", job, "--run-dir", tmp_path / "run", cwd=tmp_path, hook=asked_in_step_2):
        assert ended.exit_code == 0, ended.stderr
        assert "stopped on request" not in ended.stdout


def asked_in_step_2(rank):
    from hethub.runtime.loop.trainer import Trainer

    run_step = Trainer.run_step

    def asked(self, step, **more):
        if step == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
        return run_step(self, step, **more)

    Trainer.run_step = asked
