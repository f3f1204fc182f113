"""How far a run is, and who runs it."""

import json
import os
from pathlib import Path

from hethub.cli import run
from hethub.runtime import run_folder
from hethub.runtime.run_folder import RunFolder
from tests.support.job_files import write_job


def printed(capsys, *arguments):
    assert run(list(map(str, arguments))) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_watch_says_how_far_a_run_is_and_who_runs_it(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tmp_path = Path("a run")
    write_job(tmp_path)
    row = {"step": 2, "loss": 3.25, "tokens": 256, "step_seconds": 0.5, "predicted_step_seconds": 0.4}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "checkpoints" / "step-2").mkdir(parents=True)
    (tmp_path / "owner.json").write_text(json.dumps({"host": os.uname().nodename, "pid": os.getpid(), "since": "now"}))
    out = printed(capsys, "watch", tmp_path)
    for words in (
        f"process {os.getpid()}",
        "step 2 of 4: loss 3.2500, 0.5 s a step, predicted 0.4 s",
        "checkpoints: step 2",
        "about 1 s left",
    ):
        assert words in out
    before = {"host": os.uname().nodename, "pid": os.getpid(), "started_ticks": 1, "since": "then"}  # had this number
    (tmp_path / "owner.json").write_text(json.dumps(before))
    gone = f"process {os.getpid()} ended before the run did; go on with --resume 'a run'"
    assert gone in printed(capsys, "watch", tmp_path)
    (tmp_path / "owner.json").write_text(
        json.dumps({**before, "host": "elsewhere"})
    )  # whose processes nobody here can see
    assert f"process {os.getpid()} on elsewhere runs it since then" in printed(capsys, "watch", tmp_path, "--once")
    (tmp_path / "owner.json").unlink()
    assert "nobody runs it now" in printed(capsys, "watch", tmp_path, "--once")
    assert run(["watch", str(tmp_path / "nowhere")]) == 2


def test_watch_tells_real_time_of_an_emulation(tmp_path, capsys):
    """Steps of 4 ms, emulated at 3 s each, were said to be over in a second."""
    write_job(tmp_path)
    row = {
        "step": 2,
        "loss": 3.25,
        "tokens": 256,
        "step_seconds": 0.5,
        "predicted_step_seconds": 0.4,
        "time_scale": 60.0,
    }
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "owner.json").write_text(json.dumps({"host": "elsewhere", "pid": 1, "since": "now"}))
    out = printed(capsys, "watch", tmp_path, "--once")
    assert "step 2 of 4: loss 3.2500, 0.5 s a step, predicted 0.4 s" in out
    assert "about 60 s left" in out


def test_watch_counts_what_the_run_counts(tmp_path, capsys):
    """Samples, where a module brings batches of its own."""
    write_job(tmp_path, model_name="python:net:make", plan="hap")
    row = {"step": 2, "loss": 3.25, "tokens": 256, "step_seconds": 0.5, "predicted_step_seconds": 0.4}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    for predicted, words in ((None, "512 samples/s"), (640.0, "512 tokens/s")):
        (tmp_path / "prediction.json").write_text(json.dumps({"tokens_per_second": predicted}))
        assert words in printed(capsys, "watch", tmp_path, "--once")


def test_watch_reads_the_last_lines_only(tmp_path, capsys, monkeypatch):
    write_job(tmp_path, eval={"every_steps": 30, "batches": 1, "data": {"source": "python-stdlib"}})
    rows = [{"step": n, "loss": 3.0, "step_seconds": 0.5, "tokens": 1} for n in range(1, 100)]
    rows[69] |= {"eval_loss": 2.5}
    for row in rows[:89]:
        row["step_seconds"] = 9.0  # as ten of the last twenty took, whose median counts
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n" + lines[0][:20])  # the last is still being written
    parsed, row_of = [], run_folder._row
    monkeypatch.setattr(run_folder, "_row", lambda line: parsed.append(line) or row_of(line))
    out = printed(capsys, "watch", tmp_path, "--once")
    assert "step 99 of 4: loss 3.0000, 4.75 s a step" in out
    assert "held-out loss 2.5000 at step 70" in out
    assert len(parsed) == 30
    whole = RunFolder(tmp_path)
    for count in (0, 1, 98, 99, 100, 1000):
        assert whole.newest_rows(count) == (whole.rows()[-count:] if count else [])
    (tmp_path / "metrics.jsonl").write_text(
        "\n".join([*lines[:-1], json.dumps({**rows[-1], "eval_loss": 2.25})]) + "\n"
    )
    assert "held-out loss 2.2500 at step 99" in printed(capsys, "watch", tmp_path, "--once")
    for text, count in (("", 0), ("a line without an end", 0), (lines[0] + "\n", 1)):
        (tmp_path / "metrics.jsonl").write_text(text)
        assert len(whole.newest_rows(5)) == count
    (tmp_path / "metrics.jsonl").write_text("no line\n")
    assert run(["watch", str(tmp_path), "--once"]) == 2
