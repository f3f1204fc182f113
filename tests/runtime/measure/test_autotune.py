"""Ranks that measure themselves: the edge of memory is found without falling over it, and unlike ranks get unlike
work."""

import json
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hethub import __version__
from hethub.kernels.bodies import choose
from hethub.kernels.device import Device
from hethub.predictor.memory.ranks import rank_memory
from hethub.runtime.loop import plan
from hethub.runtime.measure import autotune
from hethub.runtime.measure.autotune import (
    kept_bytes,
    largest_batch,
    limit_bytes_of,
    measure_rank,
    measured_degrees,
    resident_bytes,
)
from hethub.spec.accelerator import find_accelerator
from hethub.spec.cluster import ClusterSpec, load_cluster
from hethub.spec.errors import BadInput
from hethub.spec.job import TrainSpec
from hethub.spec.plan import load_plan
from tests.predictor.plans import cluster, uniform
from tests.support.command import ranks
from tests.support.curves import TINY, curve
from tests.support.job_files import MODEL, write_job, write_yaml
from tests.support.job_files import plan as plan_file

TRAIN = TrainSpec(global_batch=8, seq_len=32)


@given(st.integers(0, 10_000), st.integers(1, 500), st.integers(0, 20_000), st.integers(1, 200))
def test_the_largest_batch_is_found_and_nothing_larger_was_tried(fixed, each, limit, most):
    tried = []

    def bytes_of(size):
        tried.append(size)
        return fixed + each * size

    found = largest_batch(bytes_of, limit, most)
    assert found == max(0, min(most, (limit - fixed) // each))
    # One and two samples must be tried before anything can be expected of more.
    assert all(fixed + each * size <= limit for size in tried if size > 2)
    assert len(tried) <= 2 * most.bit_length() + 1


@given(st.integers(1, 50), st.integers(0, 5), st.integers(100, 50_000))
def test_memory_that_grows_faster_is_exceeded_once_at_most(each, faster, limit):
    exceeded = []

    def bytes_of(size):
        found = each * size + faster * size * size
        exceeded.extend([size] if found > limit else [])
        return found

    found = largest_batch(bytes_of, limit, 64)
    assert found == 0 or bytes_of(found) <= limit
    assert len(exceeded) <= 6


def test_sizes_are_tried_without_a_compiler(monkeypatch):
    """Each once: a program for a size takes seconds."""
    made = []
    monkeypatch.setattr(torch._inductor, "compile", lambda graph, tensors: made.append(graph) or graph)
    choose(True)
    try:
        count = kept_bytes(TINY, TRAIN, find_accelerator("CPU-core"), Device(vendor="cpu"))
        assert 0 < count(1) < count(2)
    finally:
        choose(None)
    assert not made


def test_a_device_is_measured_in_the_shards_that_its_ranks_can_have():
    model = TINY.replace(heads=8, kv_heads=4)
    assert measured_degrees(model, Device(vendor="nvidia"), 64) == [1, 2, 4, 8]
    assert measured_degrees(model, Device(vendor="amd"), 2) == [1, 2]
    assert measured_degrees(model, Device(vendor="cpu"), 64) == [1]


def test_a_rank_measures_sizes_up_to_what_its_memory_holds():
    core = find_accelerator("CPU-core")
    device = Device(vendor="cpu")
    roomy = measure_rank(TINY, TRAIN, core, device, 2**34, 2)
    assert roomy.largest_micro_batch == 8
    assert [timing.micro_batch for timing in roomy.layers] == [1, 2, 4, 8]
    state = resident_bytes(TINY, TRAIN, 2)
    one = kept_bytes(TINY, TRAIN, core, device)(1)
    tight = measure_rank(TINY, TRAIN, core, device, state + 3 * one + one // 2, 2)
    assert tight.largest_micro_batch == 3
    assert [timing.micro_batch for timing in tight.layers] == [1, 2, 3]


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_what_a_rank_holds_for_good_is_what_the_memory_model_says(precision):
    """Of the whole model on every rank under ZeRO-1."""
    train = TRAIN.replace(precision=precision)
    spread = uniform(
        TINY, cluster(("A100-SXM4-80GB", 1, 4)), tp=1, pp=1, micro_batch=1, batch=8, seq=32, precision=precision, zero=1
    )
    parts = rank_memory(spread)[0].parts
    expected = sum(parts[name] for name in ("weights", "gradients", "optimizer"))
    assert resident_bytes(TINY, train, 4) == pytest.approx(expected, abs=3)  # each part is rounded down


def test_a_size_that_runs_out_of_memory_does_not_fit():
    def bytes_of(size):
        if size > 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 10 * size

    assert largest_batch(bytes_of, 10_000, 64) == 5
    assert largest_batch(lambda size: bytes_of(size + 5), 10_000, 64) == 0


def test_sizes_that_run_out_of_memory_while_they_are_timed_are_halved(monkeypatch):
    def timed(*args, micro_batches, **more):
        tried.append(micro_batches)
        if max(micro_batches) > room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return curve(1.0)

    tried, room = [], 3
    monkeypatch.setattr(autotune, "measure_device", timed)
    core, device = find_accelerator("CPU-core"), Device(vendor="cpu")
    assert measure_rank(TINY, TRAIN, core, device, 2**34, 2).largest_micro_batch == 2
    assert tried == [[1, 2, 4, 8], [1, 2, 4], [1, 2]]
    room = 0
    with pytest.raises(BadInput, match=r"one sequence of 32 tokens does not fit .* shorten train.seq_len"):
        measure_rank(TINY, TRAIN, core, device, 2**34, 2)


def test_what_other_programs_take_of_a_cpus_memory_is_no_room_for_a_micro_batch():
    node = {"name": "cpu", "accelerator": "CPU-core", "accelerators": 1}
    whole, part = (
        ClusterSpec(name="lab", nodes=({**node, "reserved_memory_gb": taken},)).places[0] for taken in (0, 1)
    )
    device = Device(vendor="cpu")
    assert limit_bytes_of(whole, device, 0.5) == whole.accelerator.memory_bytes // 2
    assert limit_bytes_of(part, device, 0.5) == (whole.accelerator.memory_bytes - 2**30) // 2


def test_a_model_too_large_for_one_rank_limits_no_micro_batch():
    """A plan may divide it; what a rank may then take is the memory model's to say."""
    found = measure_rank(TINY, TRAIN, find_accelerator("CPU-core"), Device(vendor="cpu"), 1, 2)
    assert found.largest_micro_batch is None
    assert [timing.micro_batch for timing in found.layers] == [1]


# -- the command -------------------------------------------------------------------------------------------------------

PAIR = {"nodes": [{"name": "cpu", "accelerator": "CPU-core", "accelerators": 2}]}


def autotuned_job(folder, steps, measure="always"):
    """A job of data parallel ranks that measure themselves first."""
    return write_job(
        folder,
        cluster=PAIR,
        plan="auto",
        measure=measure,
        constraints={"pp": 1, "tp": 1},
        train={"steps": steps},
    )


def uneven(rank):
    """Rank 1 measures three times the seconds of rank 0, both as on a machine without noise."""
    os.environ["HETHUB_CACHE"] = "cache"
    autotune.measure_device = lambda *args, **more: curve(3e-3 if rank else 1e-3)


def uneven_and_remembering(rank):
    """As ranks on devices do, which measure themselves once."""
    uneven(rank)
    plan._ranks_measure = lambda *given: True


def without_a_cache_on_rank_1(rank):
    uneven(rank)
    if rank:
        os.environ["HETHUB_CACHE"] = "job/job.yaml"  # a file, so nothing can be below it


def test_a_rank_that_cannot_remember_trains_on_with_a_warning(tmp_path):
    job = autotuned_job(tmp_path / "job", steps=1)
    ended = ranks(2, "train", job, "--run-dir", tmp_path / "run", cwd=tmp_path, hook=without_a_cache_on_rank_1)
    assert [end.exit_code for end in ended] == [0, 0], ended[0].stderr
    assert "warning: measurements are not remembered: job/job.yaml/measured cannot be written" in ended[0].stdout


def test_unlike_ranks_plan_unlike_samples(tmp_path):
    job = autotuned_job(tmp_path / "job", steps=2)
    ended = ranks(2, "train", job, "--run-dir", tmp_path / "run", cwd=tmp_path, hook=uneven)
    assert [end.exit_code for end in ended] == [0, 0], ended[0].stderr
    (stage,) = load_plan(tmp_path / "run" / "plan.yaml").stages
    assert {replica.ranks[0]: replica.samples for replica in stage.replicas} == {0: 6, 1: 2}
    assert "rank 1 (CPU-core~1) measured itself" in ended[0].stdout
    again = ranks(2, "train", job, "--run-dir", tmp_path / "again", cwd=tmp_path, hook=uneven)
    assert "rank 1 (CPU-core~1) measured itself" in again[0].stdout  # another hour may have another load


def test_nothing_is_measured_where_a_profile_is_given(tmp_path):
    autotuned_job(tmp_path / "job", steps=1)
    layer = {"micro_batch": 1, "seq_len": 32, "tp": 1, "forward_seconds": 0.1, "backward_seconds": 0.2}
    device = {"accelerator": "CPU-core", "precision": "fp32", "layers": [layer]}
    given = {"date": "2026-01-01", "hethub": __version__, "software": "test", "model": MODEL, "devices": [device]}
    (tmp_path / "given.json").write_text(json.dumps(given))
    printed, places, counted = trained(tmp_path, "--run-dir", "run", "--profile", "given.json", hook=uneven)
    assert "measured itself" not in printed
    assert (places, counted) == (["CPU-core"] * 2, ["CPU-core"])


def test_what_is_not_always_measured_is_remembered(tmp_path):
    job = autotuned_job(tmp_path / "job", steps=1, measure="auto")
    for run, how in (("run", "measured itself"), ("again", "remembers")):
        ended = ranks(2, "train", job, "--run-dir", tmp_path / run, cwd=tmp_path, hook=uneven_and_remembering)
        assert [end.exit_code for end in ended] == [0, 0], ended[0].stderr
        assert f"rank 1 (CPU-core~1) {how}" in ended[0].stdout
    assert len(list((tmp_path / "cache" / "measured").iterdir())) == 2
    for file in (tmp_path / "cache" / "measured").iterdir():
        file.write_text(file.read_text().replace('"device": "', '"device": "not '))
    refused = ranks(2, "train", job, "--run-dir", tmp_path / "third", cwd=tmp_path, hook=uneven_and_remembering)
    assert [end.exit_code for end in refused] == [2, 2]
    assert "measurements are of another device" in refused[0].stderr


def trained(tmp_path, *arguments, hook, size=2):
    """What rank 0 printed of training on so many ranks in `run`, and the accelerators of its cluster and profile."""
    run = tmp_path / "run"
    ended = ranks(size, "train", tmp_path / "job" / "job.yaml", *arguments, cwd=tmp_path, hook=hook)
    assert [end.exit_code for end in ended] == [0] * size, ended[0].stderr
    profile = run / "profile.json"
    measured = (
        [device["accelerator"] for device in json.loads(profile.read_text())["devices"]] if profile.exists() else []
    )
    places = load_cluster(run / "cluster.yaml").places
    return ended[0].stdout, [place.accelerator.name for place in places], sorted(measured)


def test_a_run_that_keeps_its_plan_keeps_its_ranks_told_apart(tmp_path):
    autotuned_job(tmp_path / "job", steps=1)
    _, *first = trained(tmp_path, "--run-dir", "run", hook=uneven)
    predicted = (tmp_path / "run" / "prediction.json").read_text()
    printed, *again = trained(tmp_path, "--resume", "run", "--set", "train.steps=2", hook=uneven)
    assert first == again == [["CPU-core", "CPU-core~1"], ["CPU-core", "CPU-core~1"]]
    assert "measured itself" not in printed
    assert (
        json.loads((tmp_path / "run" / "prediction.json").read_text())["step_seconds"]
        == json.loads(predicted)["step_seconds"]
    )


def test_a_run_that_goes_on_under_another_plan_keeps_what_its_ranks_had_measured(tmp_path):
    autotuned_job(tmp_path / "job", steps=1)
    _, *first = trained(tmp_path, "--run-dir", "run", hook=uneven)
    stages = [{"layers": [[0, 4]], "replicas": [{"ranks": [rank], "micro_batch": 2, "samples": 4} for rank in (0, 1)]}]
    other = write_yaml(tmp_path / "other.yaml", plan_file(stages))
    printed, *again = trained(tmp_path, "--resume", "run", "--plan", other, "--set", "train.steps=2", hook=uneven)
    assert first == again == [["CPU-core", "CPU-core~1"], ["CPU-core", "CPU-core~1"]]
    assert "measured itself" not in printed


@pytest.mark.parametrize(("measure", "measured"), [("always", ["CPU-core"]), ("never", [])])
def test_a_run_that_moves_to_other_ranks_is_planned_for_what_those_measure(measure, measured, tmp_path):
    autotuned_job(tmp_path / "job", steps=1)
    trained(tmp_path, "--run-dir", "run", hook=uneven)
    run, old = tmp_path / "run", ("calibration.json", "communicator_counters.json", "rehearsal.json")
    for name in old:
        (run / name).write_text("{}")
    record = json.loads((run / "communicator.json").read_text())
    record["relays"]["near"] = [[0, "gloo"]]
    (run / "communicator.json").write_text(json.dumps(record))
    write_yaml(tmp_path / "job" / "one.yaml", {"name": "one", "nodes": [{**PAIR["nodes"][0], "accelerators": 1}]})
    moved = ["--set", "cluster=one.yaml", "--set", f"measure={measure}", "--set", "train.steps=2"]
    printed, places, now = trained(tmp_path, "--resume", "run", *moved, hook=uneven, size=1)
    assert (places, now) == (["CPU-core"], measured)
    assert ("rank 0 (CPU-core) measured itself" in printed) == bool(measured)
    assert json.loads((run / "communicator.json").read_text())["relays"]["near"] == [[0, "shm"]]
    assert not [name for name in old if (run / name).exists() and (run / name).read_text() == "{}"]
