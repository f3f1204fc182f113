"""What a rank measured is remembered for its device and versions, whole or not at all."""

import errno
import json
import os
import platform
from pathlib import Path

import pytest
import torch

import hethub
from hethub.kernels.device import Device
from hethub.runtime.measure.measurement_cache import MeasurementCache, cache_folder, device_name
from hethub.spec.errors import BadInput
from hethub.spec.job import TrainSpec
from tests.support.curves import TINY, curve

TRAIN = TrainSpec(global_batch=8, seq_len=32)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HETHUB_CACHE", str(tmp_path))
    return MeasurementCache(TINY, TRAIN, Device(vendor="cpu"), 0, 2, 0.06)


def test_what_was_measured_is_remembered(cache):
    assert cache.load() is None
    cache.save(curve(1.0))
    assert cache.load() == curve(1.0)
    assert MeasurementCache(TINY, TRAIN, Device(vendor="cpu"), 1, 2, 0.06).load() is None  # another rank of the host
    assert MeasurementCache(TINY, TRAIN, Device(vendor="cpu"), 0, 4, 0.06).load() is None  # each has less of the state
    assert MeasurementCache(TINY, TRAIN, Device(vendor="cpu"), 0, 2, 0.5).load() is None  # nor as much of its memory


@pytest.mark.parametrize(
    ("model", "train"),
    [
        (TINY.replace(name="other"), TRAIN),
        (TINY, TRAIN.replace(precision="bf16")),
        (TINY, TRAIN.replace(seq_len=64)),
    ],
)
def test_measurements_of_other_jobs_lie_side_by_side(cache, model, train):
    cache.save(curve(1.0))
    other = MeasurementCache(model, train, Device(vendor="cpu"), 0, 2, 0.06)
    assert other.load() is None
    other.save(curve(2.0))
    assert (cache.load(), other.load()) == (curve(1.0), curve(2.0))


@pytest.mark.parametrize(
    ("model", "train"),
    [(TINY.replace(layers=TINY.layers + 1), TRAIN), (TINY, TRAIN.replace(global_batch=16))],
)
def test_measurements_of_another_model_of_that_name_or_batch_do_not_count(cache, model, train):
    cache.save(curve(1.0))
    assert MeasurementCache(model, train, Device(vendor="cpu"), 0, 2, 0.06).load() is None


def test_a_models_name_leads_out_of_no_folder(cache):
    other = MeasurementCache(TINY.replace(name="../up"), TRAIN, Device(vendor="cpu"), 0, 2, 0.06)
    assert other.path.parent == cache.path.parent


def test_the_cache_is_the_users(monkeypatch, tmp_path):
    monkeypatch.delenv("HETHUB_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "hethub"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for relative in ("", "cache"):  # to be ignored: freedesktop.org, XDG Base Directory Specification
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        assert cache_folder() == tmp_path / "home" / ".cache" / "hethub"


def test_a_user_without_a_home_needs_a_cache_that_is_named(monkeypatch, tmp_path):
    """As a container has one that runs under any number: Python's own error ended the run, even where a cache was named."""

    def no_home():
        raise RuntimeError("Could not determine home directory.")  # as Path.home raises it

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.delenv("HETHUB_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "hethub"
    monkeypatch.delenv("XDG_CACHE_HOME")
    with pytest.raises(BadInput, match="no home folder for hethub's cache; name a folder for it in HETHUB_CACHE"):
        cache_folder()
    monkeypatch.setenv("HETHUB_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path


def test_devices_are_called_as_their_makers_call_them(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"Abacus {index}")
    assert device_name(Device(vendor="amd", index=3)) == "Abacus 3"
    processor = Path("/proc/cpuinfo").read_text()
    assert f": {device_name(Device(vendor='cpu'))}\n" in processor or "model name" not in processor


@pytest.mark.parametrize("where", [torch, hethub, platform], ids=["torch", "hethub", "python"])
def test_measurements_by_another_version_do_not_count(cache, monkeypatch, where):
    cache.save(curve(1.0))
    if where is platform:
        monkeypatch.setattr(where, "python_version", lambda: "0.0")
    else:
        monkeypatch.setattr(where, "__version__", "0.0")
    assert MeasurementCache(TINY, TRAIN, Device(vendor="cpu"), 0, 2, 0.06).load() is None


def test_measurements_of_compiled_bodies_do_not_count_for_a_job_that_compiles_none(cache):
    cache.save(curve(1.0))
    loaded = [
        MeasurementCache(TINY, TRAIN.replace(compile=compiles), Device(vendor="cpu"), 0, 2, 0.06).load()
        for compiles in (None, True)
    ]
    assert loaded == [curve(1.0), None]


def test_measurements_of_another_device_are_refused_by_name(cache):
    cache.save(curve(1.0))
    data = json.loads(cache.path.read_text())
    data["facts"]["device"] = "Abacus 3000"
    cache.path.write_text(json.dumps(data))
    with pytest.raises(BadInput, match=r"another device, Abacus 3000; this rank has .* HETHUB_CACHE"):
        cache.load()


@pytest.mark.parametrize("content", [{}, [], {"facts": 1, "profile": curve(1.0).to_dict()}])
def test_a_cache_that_is_no_cache_is_refused(cache, content):
    cache.path.parent.mkdir(parents=True)
    cache.path.write_text(json.dumps(content))
    with pytest.raises(BadInput, match="cannot be read"):
        cache.load()


def test_a_cache_that_cannot_be_written_is_said_and_nothing_more(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HETHUB_CACHE", str(tmp_path / "file"))
    cache = MeasurementCache(TINY, TRAIN, Device(vendor="cpu"), 0, 2, 0.06)
    assert cache.load() is None
    assert "HETHUB_CACHE" in (cache.save(curve(1.0)) or "")


def test_what_a_full_disk_leaves_is_what_was_there(cache, tmp_path, monkeypatch):
    """The part that was written stayed beside it under a name of its own, one more each time."""
    cache.save(curve(1.0))

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr(Path, "replace", lambda self, target: full(0))
    assert "No space left on device" in cache.save(curve(2.0))
    assert cache.load() == curve(1.0)
    assert [path.name for path in cache.path.parent.iterdir()] == [cache.path.name]


def test_what_is_remembered_is_whole(cache):
    """A file in writing has another name, so that a rank killed then leaves no half of one."""
    assert cache.save(curve(1.0)) is None
    assert list(cache.path.parent.iterdir()) == [cache.path]
    cache.path.unlink()
    cache.path.mkdir()  # in the way of the last step, whatever the user may do
    assert "not remembered" in (cache.save(curve(1.0)) or "")
