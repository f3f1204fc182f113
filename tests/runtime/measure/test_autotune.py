"""Ranks that measure themselves: the edge of memory is found without falling over it, and unlike ranks get unlike
work."""

import json
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hethub.kernels.device import Device
from hethub.predictor.cost.profile import DeviceProfile
from hethub.runtime.measure import autotune as self_measure
from hethub.runtime.measure.autotune import Cache, combine, largest_batch, measure_rank, speed_classes, tell_apart
from hethub.spec.accelerator import find_accelerator
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput
from hethub.spec.job import TrainSpec
from hethub.spec.model import ModelSpec
from hethub.spec.plan import load_plan
from tests.support.command import ranks
from tests.support.job_files import MODEL, write_job

TINY = ModelSpec.model_validate(MODEL)
NODE = {"name": "cpu", "accelerator": "CPU-core", "accelerators": 3}
CLUSTER = ClusterSpec.model_validate({"name": "three", "nodes": [NODE]})
TRAIN = TrainSpec(global_batch=8, seq_len=32)


def curve(seconds: float, largest: int = 8) -> DeviceProfile:
    """A layer that takes so many seconds a sample, whatever the size."""
    layers = [
        {"micro_batch": b, "seq_len": 32, "forward_seconds": seconds * b / 3, "backward_seconds": seconds * b * 2 / 3}
        for b in (1, 2, 4, 8)
    ]
    content = {"accelerator": "CPU-core", "precision": "fp32", "layers": layers, "largest_micro_batch": largest}
    return DeviceProfile.model_validate(content)


# -- the largest batch -------------------------------------------------------------------------------------------------


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


def test_a_rank_measures_sizes_up_to_what_its_memory_holds():
    core = find_accelerator("CPU-core")
    device = Device(vendor="cpu")
    roomy = measure_rank(TINY, TRAIN, core, device, 2**34, 2)
    assert roomy.largest_micro_batch == 8
    assert [timing.micro_batch for timing in roomy.layers] == [1, 2, 4, 8]
    state = self_measure.resident_bytes(TINY, TRAIN, 2)
    one = self_measure.kept_bytes(TINY, TRAIN, core, device)(1)
    tight = measure_rank(TINY, TRAIN, core, device, state + 3 * one + one // 2, 2)
    assert tight.largest_micro_batch == 3
    assert [timing.micro_batch for timing in tight.layers] == [1, 2, 3]


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
    monkeypatch.setattr(self_measure, "measure_device", timed)
    core, device = find_accelerator("CPU-core"), Device(vendor="cpu")
    assert measure_rank(TINY, TRAIN, core, device, 2**34, 2).largest_micro_batch == 2
    assert tried == [[1, 2, 4, 8], [1, 2, 4], [1, 2]]
    room = 0
    with pytest.raises(BadInput, match=r"one sequence of 32 tokens does not fit .* shorten train.seq_len"):
        measure_rank(TINY, TRAIN, core, device, 2**34, 2)


def test_a_model_too_large_for_one_rank_limits_no_micro_batch():
    """A plan may divide it; what a rank may then take is the memory model's to say."""
    found = measure_rank(TINY, TRAIN, find_accelerator("CPU-core"), Device(vendor="cpu"), 1, 2)
    assert found.largest_micro_batch is None
    assert [timing.micro_batch for timing in found.layers] == [1]


# -- ranks of unlike speed ---------------------------------------------------------------------------------------------


def test_ranks_are_told_apart_where_they_differ_by_more_than_noise():
    assert speed_classes(CLUSTER.places, [curve(1.0), curve(1.1), curve(1.05)]) == [0, 0, 0]
    assert speed_classes(CLUSTER.places, [curve(2.5), curve(1.0), curve(2.6)]) == [1, 0, 1]
    assert speed_classes(CLUSTER.places, [curve(4.0), curve(2.0), curve(1.0)]) == [2, 1, 0]


def test_told_apart_ranks_keep_their_place():
    told = tell_apart(CLUSTER, [1, 0, 1])
    assert [place.accelerator.name for place in told.places] == ["CPU-core~1", "CPU-core", "CPU-core~1"]
    assert [place.rank for place in told.places] == [0, 1, 2]
    assert [node.accelerators for node in told.nodes] == [1, 1, 1]
    assert tell_apart(CLUSTER, [0, 0, 0]) is CLUSTER


def test_a_machine_that_was_split_keeps_its_own_links():
    found = combine(TINY, CLUSTER, [curve(3.0), curve(1.0), curve(1.0)], fresh=True)
    assert {device.accelerator for device in found.profile.devices} == {"CPU-core", "CPU-core~1"}
    assert {link.operation for link in found.profile.links} == {"send", "all_reduce"}
    assert "rank 0 (CPU-core~1) measured itself: 3e+03 ms a layer and sample, largest micro-batch 8" in found.lines


def test_of_alike_ranks_the_slowest_counts():
    found = combine(TINY, CLUSTER, [curve(1.0), curve(1.1), curve(1.05)], fresh=False)
    (device,) = found.profile.devices
    assert self_measure.seconds_per_sample(device) == pytest.approx(1.1)
    assert "remembers" in found.lines[0]


def test_of_alike_ranks_the_smallest_micro_batch_counts():
    found = combine(TINY, CLUSTER, [curve(1.0, 2), curve(1.1, 8), curve(3.0, 4)], fresh=True)
    assert {d.accelerator: d.largest_micro_batch for d in found.profile.devices} == {"CPU-core": 2, "CPU-core~1": 4}
    unfitting = curve(1.0).replace(largest_micro_batch=None)
    found = combine(TINY, CLUSTER, [unfitting] * 3, fresh=True)
    assert found.profile.devices[0].largest_micro_batch is None
    assert "no room for the whole model" in found.lines[0]


# -- the cache ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HETHUB_CACHE", str(tmp_path))
    return Cache(TINY, TRAIN, Device(vendor="cpu"), 0)


def test_what_was_measured_is_remembered(cache):
    assert cache.load() is None
    cache.save(curve(1.0))
    assert cache.load() == curve(1.0)
    assert Cache(TINY, TRAIN, Device(vendor="cpu"), 1).load() is None  # another rank of the host


def test_measurements_by_another_version_do_not_count(cache):
    cache.save(curve(1.0))
    data = json.loads(cache.path.read_text())
    data["facts"]["torch"] = "1.0"
    cache.path.write_text(json.dumps(data))
    assert cache.load() is None


def test_measurements_of_another_device_are_refused_by_name(cache):
    cache.save(curve(1.0))
    data = json.loads(cache.path.read_text())
    data["facts"]["device"] = "Abacus 3000"
    cache.path.write_text(json.dumps(data))
    with pytest.raises(BadInput, match=r"another device, Abacus 3000; this rank has .* HETHUB_CACHE"):
        cache.load()


def test_a_cache_that_is_no_cache_is_refused(cache):
    cache.path.parent.mkdir(parents=True)
    cache.path.write_text("{}")
    with pytest.raises(BadInput, match="cannot be read"):
        cache.load()


def test_a_cache_that_cannot_be_written_is_said_and_nothing_more(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HETHUB_CACHE", str(tmp_path / "file"))
    cache = Cache(TINY, TRAIN, Device(vendor="cpu"), 0)
    assert cache.load() is None
    assert "HETHUB_CACHE" in (cache.save(curve(1.0)) or "")


def test_what_is_remembered_is_whole(cache):
    """A file in writing has another name, so that a rank killed then leaves no half of one."""
    assert cache.save(curve(1.0)) is None
    assert list(cache.path.parent.iterdir()) == [cache.path]
    cache.path.unlink()
    cache.path.mkdir()  # in the way of the last step, whatever the user may do
    assert "not remembered" in (cache.save(curve(1.0)) or "")


# -- the command -------------------------------------------------------------------------------------------------------

PAIR = {"nodes": [{"name": "cpu", "accelerator": "CPU-core", "accelerators": 2}]}


def self_measured_job(folder, steps):
    """A job of data parallel ranks that measure themselves first."""
    return write_job(
        folder,
        cluster=PAIR,
        plan="auto",
        measure="always",
        constraints={"pp": 1, "tp": 1},
        train={"steps": steps},
    )


def uneven(rank):
    """Rank 1 measures three times the seconds of rank 0, both as on a machine without noise."""
    os.environ["HETHUB_CACHE"] = "cache"
    self_measure.measure_device = lambda *args, **more: curve(3e-3 if rank else 1e-3)


def without_a_cache_on_rank_1(rank):
    uneven(rank)
    if rank:
        os.environ["HETHUB_CACHE"] = "job/job.yaml"  # a file, so nothing can be below it


def test_a_rank_that_cannot_remember_trains_on_with_a_warning(tmp_path):
    job = self_measured_job(tmp_path / "job", steps=1)
    ended = ranks(2, "train", job, "--run-dir", tmp_path / "run", cwd=tmp_path, hook=without_a_cache_on_rank_1)
    assert [end.exit_code for end in ended] == [0, 0], ended[0].stderr
    assert "warning: measurements are not remembered: job/job.yaml/measured cannot be written" in ended[0].stdout


def test_unlike_ranks_plan_unlike_samples_and_remember_it(tmp_path):
    job = self_measured_job(tmp_path / "job", steps=2)
    ended = ranks(2, "train", job, "--run-dir", tmp_path / "run", cwd=tmp_path, hook=uneven)
    assert [end.exit_code for end in ended] == [0, 0], ended[0].stderr
    (stage,) = load_plan(tmp_path / "run" / "plan.yaml").stages
    assert {replica.ranks[0]: replica.samples for replica in stage.replicas} == {0: 6, 1: 2}
    assert "rank 1 (CPU-core~1) measured itself" in ended[0].stdout
    again = ranks(2, "train", job, "--run-dir", tmp_path / "again", cwd=tmp_path, hook=uneven)
    assert "rank 1 (CPU-core~1) remembers" in again[0].stdout
    assert len(list((tmp_path / "cache" / "measured").iterdir())) == 2
    for file in (tmp_path / "cache" / "measured").iterdir():
        file.write_text(file.read_text().replace('"device": "', '"device": "not '))
    refused = ranks(2, "train", job, "--run-dir", tmp_path / "third", cwd=tmp_path, hook=uneven)
    assert [end.exit_code for end in refused] == [2, 2]
    assert "measurements are of another device" in refused[0].stderr
