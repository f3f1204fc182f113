"""Going on by itself: which folder, under which job, what stays; and how a run that is stopped says so."""

import contextlib
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import yaml

from hethub.runtime.checkpoint import newest_marker
from hethub.runtime.going_on import check_unchanged, goes_on_by_itself, newest_run
from hethub.runtime.run_folder import AUTO, RunFolder, with_whole_paths
from hethub.spec.documents import dump_yaml
from hethub.spec.errors import BadInput
from hethub.spec.job import load_job
from tests.support.command import check_refused, one, ranks
from tests.support.job_files import ALONE, MODEL, plan, write_job, write_pair_job


@pytest.fixture
def job(tmp_path):
    """A job for one rank, of six steps with a checkpoint at every second."""
    nodes = [{"name": "here", "accelerator": "CPU-core", "accelerators": 1}]
    return write_job(tmp_path / "job", cluster={"nodes": nodes}, plan_file=plan(ALONE), train={"steps": 6})


def steps_of(run):
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def train(job, *arguments, cwd, hook=None):
    return one(ranks(1, "train", job, *arguments, cwd=cwd, hook=hook))


def test_a_run_that_goes_on_is_predicted_from_what_it_measured(job, tmp_path):
    measure = ["--set", "plan=auto", "--set", "measure=always", "--run-dir", "run"]
    assert train(job, *measure, "--set", "train.steps=2", cwd=tmp_path).exit_code == 0
    begun = json.loads((tmp_path / "run" / "prediction.json").read_text())
    again = ["--set", "plan=auto", "--resume", "run"]
    ended = train(job, *again, "--set", "train.steps=3", cwd=tmp_path)
    assert ended.exit_code == 0, ended.stderr
    assert "the speed of CPU-core is assumed" not in ended.stdout
    assert json.loads((tmp_path / "run" / "prediction.json").read_text())["step_seconds"] == begun["step_seconds"]
    (tmp_path / "run" / "profile.json").write_text("{}")
    assert "the speed of CPU-core is assumed" in train(job, *again, "--set", "train.steps=4", cwd=tmp_path).stdout


def as_restarted_by_torchrun(rank):
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"


def test_resume_auto_begins_a_run_goes_on_with_it_and_says_when_it_is_done(job, tmp_path):
    begun = train(job, "--resume", "auto", "--set", "train.steps=4", cwd=tmp_path)
    assert begun.exit_code == 0, begun.stderr
    assert "the speed of CPU-core is assumed, not measured" in begun.stdout
    (run,) = (tmp_path / "runs").iterdir()
    for hook, steps in ((None, 6), (as_restarted_by_torchrun, 8)):
        resume = [] if hook else ["--resume", "auto"]
        ended = train(job, *resume, "--set", f"train.steps={steps}", cwd=tmp_path, hook=hook)
        assert ended.exit_code == 0, ended.stderr
        assert f"resumed behind step {steps - 2}" in ended.stdout
        assert steps_of(run) == list(range(1, steps + 1))
    assert list((tmp_path / "runs").iterdir()) == [run]
    done = train(job, "--resume", "auto", "--set", "train.steps=8", cwd=tmp_path)
    assert "all 8 steps are trained already" in done.stdout


def test_a_start_with_no_step_left_to_train_leaves_the_folder_to_the_job_that_trained(job, tmp_path):
    assert train(job, "--run-dir", "run", cwd=tmp_path).exit_code == 0
    done = train(job, "--resume", "run", "--set", "train.lr=0.5", "--accept-changes", cwd=tmp_path)
    assert "all 6 steps are trained already" in done.stdout
    ended = train(job, "--resume", "run", "--set", "train.steps=8", cwd=tmp_path)
    assert ended.exit_code == 0, ended.stderr
    assert steps_of(tmp_path / "run") == list(range(1, 9))


@pytest.mark.parametrize("run_dir", [[], ["--run-dir", "run"]])
def test_resume_auto_goes_on_from_a_first_checkpoint_that_lacks_its_name(job, tmp_path, run_dir):
    """Its run was killed between the checkpoint's marker and its name."""
    more = ["--resume", "auto", *run_dir]
    assert train(job, *more, "--set", "train.steps=2", cwd=tmp_path).exit_code == 0
    (run,) = [tmp_path / "run"] if run_dir else (tmp_path / "runs").iterdir()
    (run / "checkpoints" / "step-2").rename(run / "checkpoints" / "step-2.partial")
    (run / "owner.json").write_text("{}")
    ended = train(job, *more, cwd=tmp_path)
    assert ended.exit_code == 0, ended.stderr
    assert "resumed behind step 2" in ended.stdout
    assert steps_of(run) == list(range(1, 7))


def test_which_starts_go_on_by_themselves():
    assert goes_on_by_itself(AUTO, {})
    assert goes_on_by_itself(None, {"SLURM_RESTART_COUNT": "2"})
    assert goes_on_by_itself(None, {"TORCHELASTIC_RESTART_COUNT": "1"})
    assert not goes_on_by_itself(None, {"TORCHELASTIC_RESTART_COUNT": "0"})
    assert not goes_on_by_itself(Path("runs/mine"), {"SLURM_RESTART_COUNT": "1"})


def test_ranks_go_on_where_any_of_them_was_started_again(tmp_path):
    """A torchrun that takes another's place, or follows it into a new round, counts no restart of its own ranks."""
    job = write_pair_job(tmp_path / "job", communicator={"timeout_seconds": 20})
    ended = ranks(2, "train", job, "--set", "train.steps=2", cwd=tmp_path)
    assert [each.exit_code for each in ended] == [0, 0], ended[0].stderr
    ended = ranks(2, "train", job, cwd=tmp_path, hook=started_again)
    assert [each.exit_code for each in ended] == [0, 0], ended[0].stderr
    assert "resumed behind step 2" in ended[0].stdout


def started_again(rank):
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(rank)


def test_a_changed_job_is_refused_key_by_key_unless_it_is_accepted(job, tmp_path):
    assert train(job, "--run-dir", "run", "--set", "train.steps=4", cwd=tmp_path).exit_code == 0
    before = (tmp_path / "run" / "job.yaml").read_text()
    changed = ["--set", "train.lr=0.001", "--set", "train.grad_clip=0.5", "--set", "checkpoint.keep=3"]
    refused = train(job, "--resume", "run", *changed, cwd=tmp_path)
    assert refused.exit_code == 2
    (paragraph,) = refused.paragraphs
    for words in ("train.lr was 0.003, is 0.001", "train.grad_clip was 1.0, is 0.5", "--accept-changes"):
        assert words in paragraph
    assert "checkpoint" not in paragraph
    assert (tmp_path / "run" / "job.yaml").read_text() == before
    accepted = train(job, "--resume", "run", *changed, "--accept-changes", cwd=tmp_path)
    assert accepted.exit_code == 0, accepted.stderr
    assert "the job has changed: train.lr was 0.003, is 0.001" in accepted.stdout
    assert steps_of(tmp_path / "run") == list(range(1, 7))


def test_other_tokens_are_no_change_to_accept_and_a_run_says_every_chunk_of_its_plan(job, tmp_path):
    """It was offered to go on with another source, and then refused; chunks [0, 2) and [2, 4) were said to be [0, 4)."""
    chunks = [{**ALONE[0], "layers": [[0, 2], [2, 4]]}]
    plan_file = Path(write_job(tmp_path / "other", plan_file=plan(chunks, schedule="interleaved"))).with_name(
        "plan.yaml"
    )
    begun = train(job, "--run-dir", "run", "--plan", plan_file, "--set", "train.steps=2", cwd=tmp_path)
    assert "plan (plan file), schedule interleaved: layers [0, 2), [2, 4) on ranks [0]\n" in begun.stdout, begun.stderr
    other = ["--set", "data={source: python-stdlib}"]
    refused = train(job, "--resume", "run", *other, cwd=tmp_path)
    check_refused(
        [refused], "data.source was text, is python-stdlib", "--accept-changes", "only while its tokens are the same"
    )
    check_refused([train(job, "--resume", "run", *other, "--accept-changes", cwd=tmp_path)], "start a new run")


def test_a_job_without_clipping_goes_on_as_it_is(job, tmp_path):
    """The run folder's job.yaml had no null of a key whose default is another value: the job had changed, it was said,
    and `--resume auto` began anew."""
    without = ["--set", "train.grad_clip=null", "--set", "checkpoint.every_steps=null"]
    assert train(job, "--resume", "auto", "--set", "train.steps=2", *without, cwd=tmp_path).exit_code == 0
    ended = train(job, "--resume", "auto", *without, cwd=tmp_path)
    assert ended.exit_code == 0, ended.stderr
    assert "resumed behind step 2" in ended.stdout
    (run,) = (tmp_path / "runs").iterdir()
    kept = load_job(run / "job.yaml").spec
    assert kept.train.grad_clip is kept.checkpoint.every_steps is None


def test_a_run_goes_on_from_an_older_checkpoint_that_is_named(job, tmp_path):
    checkpoints = tmp_path / "run" / "checkpoints"
    keep = ["--set", "checkpoint={every_steps: 2, keep: 3}"]
    assert train(job, "--run-dir", "run", *keep, cwd=tmp_path).exit_code == 0
    refused = train(job, "--resume", "run/checkpoints/step-3", *keep, cwd=tmp_path)
    assert refused.exit_code == 2
    assert "there is no such checkpoint; there are step-6, step-4, step-2." in refused.paragraphs[0]
    ended = train(job, "--resume", "run/checkpoints/step-2", "--set", "train.steps=3", *keep, cwd=tmp_path)
    assert ended.exit_code == 0, ended.stderr
    assert "resumed behind step 2" in ended.stdout
    assert "step-6 is newer than what training goes on from" in ended.stderr
    assert {path.name for path in checkpoints.iterdir()} == {"step-2", "step-3", "step-4.set-aside", "step-6.set-aside"}
    assert steps_of(tmp_path / "run") == [1, 2, 3]


@pytest.mark.parametrize(("steps", "traced"), [("[1, 2]", False), ("[1, 3]", True)])
def test_steps_to_trace_that_are_all_behind_a_resumed_run_are_told(job, tmp_path, steps, traced):
    """Nothing was traced, and nothing said of it."""
    begun = train(job, "--run-dir", "run", "--set", "train.steps=2", cwd=tmp_path)
    assert begun.exit_code == 0, begun.stderr
    ended = train(job, "--resume", "run", "--set", f"log.profile_steps={steps}", cwd=tmp_path)
    assert ended.exit_code == 0, ended.stderr
    told = "log.profile_steps [1, 2] lie behind the resumed step: nothing will be traced"
    assert (told in ended.stdout, (tmp_path / "run" / "profile").exists()) == (not traced, traced)
    if traced:
        again = train(
            job, "--resume", "run", "--set", f"log.profile_steps={steps}", "--set", "train.steps=7", cwd=tmp_path
        )
        assert "will be traced" not in again.stdout  # they have been


@pytest.mark.parametrize("named", ["the run's", "job's", "none"])
def test_a_model_of_another_depth_is_refused_as_such(job, tmp_path, named):
    """The run's own plan was to be given the other layers."""
    plans = {"the run's": ["--set", "plan=auto"], "job's": [], "none": ["--set", "plan=uniform"]}[named]
    assert train(job, "--run-dir", "run", *plans, "--set", "train.steps=1", cwd=tmp_path).exit_code == 0
    if named == "none":
        (tmp_path / "run" / "plan.yaml").unlink()
    (job.parent / "deep.yaml").write_text(dump_yaml({**MODEL, "layers": 6}))
    ended = train(job, "--resume", "run", *plans, "--set", "model=deep.yaml", "--accept-changes", cwd=tmp_path)
    paragraph = check_refused([ended], "run", "layers 4 there, 6 here", "Resume with the model that was saved")
    assert "stage" not in paragraph


def test_a_model_that_has_another_name_now_goes_on_under_the_runs_plan(job, tmp_path):
    """As where a Hugging Face folder, whose name is the model's, has moved: the run's own plan was called another model's."""
    assert train(job, "--run-dir", "run", "--set", "plan=auto", "--set", "train.steps=1", cwd=tmp_path).exit_code == 0
    (job.parent / "model.yaml").write_text(dump_yaml({**MODEL, "name": "moved"}))
    ended = train(job, "--resume", "run", "--set", "plan=auto", "--set", "train.steps=2", cwd=tmp_path)
    assert ended.exit_code == 0, ended.stderr
    assert "resumed behind step 1" in ended.stdout
    assert yaml.safe_load((tmp_path / "run" / "plan.yaml").read_text())["model"] == "moved"


def test_where_and_how_a_job_runs_and_how_long_may_change(job, tmp_path):
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    shutil.copy(job, run.path / "job.yaml")
    shutil.copytree(job.parent, tmp_path / "moved")
    overrides = ["train.steps=9", "checkpoint.keep=1", "measure=always", "data.path=../moved/text.txt"]
    assert check_unchanged(run, load_job(job, overrides), accepted=False) == []
    with pytest.raises(BadInput, match=r"communicator.wire was exact, is int8"):
        check_unchanged(run, load_job(job, ["communicator.wire=int8"]), accepted=False)
    for key, value in (("train.seed", 7), ("train.precision", "bf16")):
        with pytest.raises(BadInput, match=rf"under another {key} only a new run can begin\.$"):
            check_unchanged(run, load_job(job, [f"{key}={value}", "train.lr=1.0e-3"]), accepted=False)


def begun(job, name, *overrides):
    """A run folder of the job with a checkpoint, written after those before."""
    folder = RunFolder(Path("runs") / name)
    (folder.checkpoints / "step-4").mkdir(parents=True)
    (folder.path / "job.yaml").write_text(dump_yaml(with_whole_paths(load_job(job, overrides))))
    (folder.checkpoints / "step-4" / "COMPLETE").touch()
    os.utime(folder.checkpoints / "step-4" / "COMPLETE", (len(os.listdir("runs")),) * 2)
    return folder.path


def test_resume_auto_takes_this_jobs_runs_only(job, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    for other in ("job-2", "job-2-20260101-120000x", "other"):
        begun(job, f"{other}-20260101-120000")
    assert newest_run(load_job(job)) is None
    assert not caplog.records
    two = begun(job, "job-20260101-120002", "train.seed=2")
    assert newest_run(load_job(job)) is None
    assert "train.seed was 2, is 1; --resume runs/job-20260101-120002" in caplog.text
    assert newest_run(load_job(job), accept_changes=True) == two
    first, second = begun(job, "job-20260101-120000"), begun(job, "job-20260101-120000-2")
    begun(job, "job-20260101-120003", "train.seed=3")
    assert newest_run(load_job(job)) == second
    (second / "checkpoints" / "step-4" / "COMPLETE").unlink()  # removed between two looks
    assert newest_run(load_job(job)) == first
    assert newest_run(load_job(job, ["train.seed=2"])) == two


def test_resume_auto_knows_another_model_or_text_of_the_same_name(job, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = begun(job, "job-20260101-120000")
    elsewhere = Path(shutil.copytree(job.parent, tmp_path / "elsewhere")) / job.name
    assert newest_run(load_job(job)) == run
    assert newest_run(load_job(elsewhere)) is None  # their model and text may be others
    shutil.rmtree(job.parent)
    assert newest_run(load_job(elsewhere)) == run  # they were moved


def test_resume_auto_knows_a_tokenizer_by_its_link_and_by_what_that_names(job, tmp_path, monkeypatch):
    """Run folders of earlier versions name what the link led to."""
    monkeypatch.chdir(tmp_path)
    (job.parent / "blob").touch()
    (job.parent / "tokenizer.json").symlink_to("blob")
    linked = "data.tokenizer=tokenizer.json"
    before = begun(job, "job-20260101-120000", "data.tokenizer=blob")
    assert newest_run(load_job(job, [linked])) == before
    now = begun(job, "job-20260101-120001", linked)
    assert newest_run(load_job(job, [linked])) == now
    assert f"{job.parent / 'tokenizer.json'}" in (now / "job.yaml").read_text()


def test_some_checkpoints_stay_for_good_and_links_are_left_alone(job, tmp_path):
    kept = tmp_path / "elsewhere"
    kept.mkdir()
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step-0").symlink_to(kept)
    (kept / "COMPLETE").write_text("somebody's own")
    checkpoint = ["--set", "checkpoint={every_steps: 1, keep: 1, keep_every: 3}"]
    ended = train(job, "--run-dir", "run", "--set", "train.steps=7", *checkpoint, cwd=tmp_path)
    assert ended.exit_code == 0, ended.stderr
    names = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert names == {"step-0", "step-3", "step-6", "step-7"}
    assert (kept / "COMPLETE").read_text() == "somebody's own"
    assert newest_marker(tmp_path / "run" / "checkpoints") is not None


def test_ctrl_c_saves_says_how_to_go_on_and_leaves_nothing_partial(job, tmp_path):
    run = tmp_path / "a run"
    overrides = ["--set", "train.steps=100000", "--set", "checkpoint.every_steps=null"]
    ended = train(job, "--run-dir", run, *overrides, cwd=tmp_path, hook=interrupting_behind_step_3)
    assert ended.exit_code == 3, ended.stderr
    (paragraph,) = ended.paragraphs
    assert "stopping behind this step, with a checkpoint; Ctrl-C again ends at once" in paragraph
    last = steps_of(run)[-1]
    assert 3 <= last < 100000
    assert f"stopped on request at step {last}; continue with --resume '{run}'\n" in ended.stdout
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step-{last}"]
    assert (run / "report.html").exists()


def interrupting_behind_step_3(rank):
    from hethub.runtime.run_folder import RunFolder

    append = RunFolder.append

    def appending(self, metrics):
        append(self, metrics)
        if metrics.step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    RunFolder.append = appending


def test_a_signal_before_the_first_step_is_heard(job, tmp_path):
    ended = train(job, "--run-dir", "run", cwd=tmp_path, hook=asked_to_end_before_it_reads)
    assert ended.exit_code == 1, ended.stderr
    (paragraph,) = ended.paragraphs
    assert "SIGUSR1" in paragraph
    assert "before its first step" in paragraph
    assert not (tmp_path / "run").exists()


def asked_to_end_before_it_reads(rank):
    from hethub.commands import train

    def reading(*_):
        with contextlib.suppress(BaseException):  # as imports do that make an error of their own of any other
            os.kill(os.getpid(), signal.SIGUSR1)
        raise AssertionError("the signal was not heard")

    train.runs_program = reading


@pytest.mark.parametrize(("steps", "code"), [(1, 0), (-1, 2)])
def test_a_wish_to_save_when_all_is_over_ends_nobody(job, tmp_path, steps, code):
    """It would have killed the process, and with it the job, or what the rank had to say."""
    more = ["--run-dir", "run", "--set", f"train.steps={steps}"]
    assert train(job, *more, cwd=tmp_path, hook=asked_to_save_when_all_is_over).exit_code == code


def asked_to_save_when_all_is_over(rank):
    from hethub import cli

    def run(arguments, run=cli._run):
        code = run(arguments)
        os.kill(os.getpid(), signal.SIGUSR1)
        return code

    cli._run = run


def test_what_fails_under_resume_auto_is_worth_starting_again(job, tmp_path):
    """A disk that is full, or a rank that dies, is a failure; the command that failed goes on where it was."""
    before = train(job, "--resume", "auto", "--set", "train.steps=4", cwd=tmp_path)
    assert before.exit_code == 0, before.stderr
    assert train(job, "--resume", "auto", cwd=tmp_path, hook=with_a_full_disk).exit_code == 75
    (run,) = (tmp_path / "runs").iterdir()
    assert train(job, "--resume", run, cwd=tmp_path, hook=with_a_full_disk).exit_code == 1


def with_a_full_disk(rank):
    from hethub.runtime import run_folder

    def refuse(*_):
        raise OSError(28, "No space left on device")

    run_folder.write_whole = refuse


@pytest.mark.parametrize(("resume", "code"), [([], 1), (["--resume", "auto"], 75)])
def test_a_rank_lost_while_another_waits_for_it_is_worth_starting_again(tmp_path, resume, code):
    """Rank 0 stands in a call of the store's that nothing interrupts: its watchdog ends it."""
    job = write_pair_job(tmp_path / "job", communicator={"timeout_seconds": 8})
    survivor, _ = ranks(2, "train", job, *resume, cwd=tmp_path, hook=dies_while_it_reads)
    assert "rank 0 ends because rank 1 is gone" in survivor.stderr
    assert survivor.exit_code == code


def dies_while_it_reads(rank):
    from hethub.runtime.loop import train

    if rank == 1:
        train.check_job = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
