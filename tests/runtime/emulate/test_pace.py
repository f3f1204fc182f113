"""An emulation takes the planned time by its own books, and trains exactly what a run on real devices would."""

import json
import re
from types import SimpleNamespace

import pytest
import torch

from hethub.kernels.device import Device
from hethub.predictor import predict
from hethub.predictor.memory.ranks import RankMemory
from hethub.runtime.emulate import pace as pace_module
from hethub.runtime.emulate.network import EmulatedClock
from hethub.runtime.emulate.pace import EmulatedPace, round_up
from hethub.runtime.memory.host_arena import HostArena
from hethub.spec.errors import RunFailed
from tests.support.command import ranks
from tests.support.emulated import EMULATED, layout
from tests.support.job_files import write_job


def test_scales_are_rounded_up_to_two_digits():
    assert [round_up(value) for value in (0.0123, 123.4, 7.0)] == pytest.approx([0.013, 130.0, 7.0])


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("emulated")
    job = write_job(folder / "job", cluster=EMULATED, train={"steps": 4})
    ended = ranks(4, "train", job, "--run-dir", folder / "run", cwd=folder)
    assert [end.exit_code for end in ended] == [0] * 4, ended[0].stderr
    return ended[0], folder / "run"


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_an_emulated_run_says_that_it_is_one(emulated):
    ended, run = emulated
    assert "emulated (median)" in ended.stdout
    assert "measured" not in ended.stdout
    assert "measured" not in (run / "report.html").read_text()
    report = json.loads((run / "rehearsal.json").read_text())
    assert len(report["overrun_percent_by_rank"]) == 4
    assert report["overrun_percent"] == max(report["overrun_percent_by_rank"])
    assert [row["time_scale"] for row in metrics(run)] == [report["time_scale"]] * 4
    assert report["time_scale"] > 0


def test_no_emulated_step_is_shorter_than_its_busiest_rank(emulated):
    _, run = emulated
    bound = layout()
    prediction = predict(bound)
    assert prediction.step_seconds == pytest.approx(metrics(run)[0]["predicted_step_seconds"])
    assert min(row["step_seconds"] for row in metrics(run)) >= prediction.breakdown["compute"]


def test_memory_is_that_of_the_emulated_accelerator(emulated):
    _, run = emulated
    predicted = max(entry.bytes for entry in predict(layout()).memory)
    assert metrics(run)[-1]["memory_bytes"] == pytest.approx(predicted, rel=0.05)


def test_the_loss_is_that_of_a_run_on_cpus(emulated, tmp_path):
    job = write_job(tmp_path / "job", train={"steps": 4})
    ended = ranks(4, "train", job, "--run-dir", tmp_path / "run", cwd=tmp_path)
    assert ended[0].exit_code == 0, ended[0].stderr
    real, emulated = ([row["loss"] for row in metrics(run)] for run in (tmp_path / "run", emulated[1]))
    assert emulated == pytest.approx(real, rel=1e-6)


def test_a_scale_that_is_too_small_is_refused_with_the_one_it_needs(tmp_path):
    job = write_job(tmp_path / "job", cluster=EMULATED, rehearsal={"time_scale": 1e-3})
    ended = ranks(4, "train", job, "--run-dir", tmp_path / "run", cwd=tmp_path)
    assert [end.exit_code for end in ended] == [2] * 4
    assert "rehearsal.time_scale" in ended[0].stderr
    assert not (tmp_path / "run").exists()
    found = re.search(r"at least ([\d.e+-]*\d)", ended[0].stderr)
    assert found
    # It is measured anew, on a machine that may be busier by then.
    job = write_job(
        tmp_path / "again", cluster=EMULATED, rehearsal={"time_scale": 4 * float(found[1])}, train={"steps": 1}
    )
    ended = ranks(4, "train", job, "--run-dir", tmp_path / "run", cwd=tmp_path)
    assert [end.exit_code for end in ended] == [0] * 4, ended[0].stderr


def test_what_is_fetched_is_there_when_its_copy_has_ended():
    """Beside what is stored, whose copy nobody waits for, and as slow as both ways at once are."""
    pace = EmulatedPace.__new__(EmulatedPace)
    pace._clock, pace._host_copies_end = EmulatedClock(scale=1.0), {True: 0.0, False: 0.0}
    pace._times = SimpleNamespace(host_seconds_per_byte=1e-3, host_passing_seconds_per_byte=2e-3)
    arena, begun = HostArena(Device(vendor="cpu"), pace), pace._clock.at
    host = arena.empty(10, torch.float32)
    arena.store(host, torch.ones(10))  # 40 bytes: until 0.04 s
    fetch = arena.fetch(host)  # beside it: until 0.08 s
    assert pace._clock.at == begun
    with fetch.behind():
        assert pace._clock.at == pytest.approx(begun + 0.08)
    assert pace._clock.at == begun
    fetch.wait()
    assert pace._clock.at == pytest.approx(begun + 0.08)


def test_a_device_that_has_less_memory_than_the_run_counts_fails_by_name():
    pace = EmulatedPace.__new__(EmulatedPace)
    pace.rank = 3
    pace._memory = RankMemory(3, "T4", 900, 1000, {"framework": 500, "weights": 400}, 0, {})
    assert pace.memory_bytes(500) == 1000
    with pytest.raises(RunFailed, match=r"rank 3 \(T4, emulated\) is out of memory: it needs 1,001 bytes"):
        pace.memory_bytes(501)


def give_less_memory(rank):
    """Rank 2's emulated accelerator turns out to have half a GiB, which no plan knew."""
    planned = pace_module.rank_memory

    def found(layout, only):
        return [entry._replace(limit=2**29) if entry.rank == 2 else entry for entry in planned(layout, only=only)]

    if rank == 2:
        pace_module.rank_memory = found


def test_a_run_ends_where_an_emulated_accelerator_is_out_of_memory(tmp_path):
    job = write_job(tmp_path / "job", cluster=EMULATED)
    ended = ranks(4, "train", job, "--run-dir", tmp_path / "run", cwd=tmp_path, hook=give_less_memory)
    assert [end.exit_code for end in ended] == [1] * 4
    (told,) = ended[2].paragraphs
    assert "rank 2 (MI250X-GCD, emulated) is out of memory: it needs" in told
    assert "Lower micro_batch or in_flight" in told


def test_an_emulated_cluster_is_not_measured(tmp_path):
    job = write_job(tmp_path / "job", cluster=EMULATED)
    ended = ranks(4, "profile", job, "--out", tmp_path / "profile.json", cwd=tmp_path)
    assert [end.exit_code for end in ended] == [2] * 4
    assert "nothing of it to measure" in ended[0].stderr
