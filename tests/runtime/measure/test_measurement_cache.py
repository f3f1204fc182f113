"""What a rank measured is remembered for its device and versions, whole or not at all."""

import json

import pytest

from hethub.kernels.device import Device
from hethub.runtime.measure.measurement_cache import MeasurementCache
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


def test_measurements_by_another_version_do_not_count(cache):
    cache.save(curve(1.0))
    data = json.loads(cache.path.read_text())
    data["facts"]["torch"] = "1.0"
    cache.path.write_text(json.dumps(data))
    assert cache.load() is None


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


def test_a_cache_that_is_no_cache_is_refused(cache):
    cache.path.parent.mkdir(parents=True)
    cache.path.write_text("{}")
    with pytest.raises(BadInput, match="cannot be read"):
        cache.load()


def test_a_cache_that_cannot_be_written_is_said_and_nothing_more(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HETHUB_CACHE", str(tmp_path / "file"))
    cache = MeasurementCache(TINY, TRAIN, Device(vendor="cpu"), 0, 2, 0.06)
    assert cache.load() is None
    assert "HETHUB_CACHE" in (cache.save(curve(1.0)) or "")


def test_what_is_remembered_is_whole(cache):
    """A file in writing has another name, so that a rank killed then leaves no half of one."""
    assert cache.save(curve(1.0)) is None
    assert list(cache.path.parent.iterdir()) == [cache.path]
    cache.path.unlink()
    cache.path.mkdir()  # in the way of the last step, whatever the user may do
    assert "not remembered" in (cache.save(curve(1.0)) or "")
