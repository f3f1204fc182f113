"""A real device's pace: what it times, and which updates count with which step."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hethub.kernels import device as device_layer
from hethub.kernels.device import Clock, Device
from hethub.runtime.loop.build import _pace
from hethub.runtime.pace import Pace, WatchedPace
from hethub.runtime.pipeline.spans import SpanLog
from hethub.spec.layout.execution import Action, Kind


def test_a_real_device_is_timed_between_entering_and_leaving():
    pace = WatchedPace(Device(vendor="cpu"))
    pace.start_step()
    pace.enter(Kind.FORWARD, 0)
    pace.leave()
    first = pace.take_busy_seconds()
    assert first is not None
    assert first.keys() == {"forward"}
    assert first["forward"] > 0.0
    with pace.stepping(1):
        pass
    pace.start_step()
    second = pace.take_busy_seconds()
    assert second is not None
    assert second.keys() == {"step"}  # the update behind the last asking


class SimulatedGpu:
    """A GPU's events: work is submitted in no time, and done one piece behind the other on the device's own clock."""

    def __init__(self, monkeypatch):
        self.host, self.queued, self.waits = 1000.0, 0.0, 0
        gpu = self

        class Event:
            def __init__(self, enable_timing=False, blocking=False):
                assert enable_timing

            def record(self):
                gpu.queued = max(gpu.queued, gpu.host)
                self.at = gpu.queued

            def synchronize(self):
                gpu.waits += 1
                gpu.host = max(gpu.host, self.at)

            def elapsed_time(self, later):
                return (later.at - self.at) * 1e3

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(device_layer, "monotonic", lambda: self.host)

    def submit(self, seconds):
        self.queued = max(self.queued, self.host) + seconds


def test_a_device_is_timed_by_its_own_events_and_not_waited_for(monkeypatch):
    gpu = SimulatedGpu(monkeypatch)
    pace = WatchedPace(Device(vendor="nvidia"))
    gpu.submit(5.0)  # of the step before
    pace.start_step()
    pace.enter(Kind.FORWARD, 0)
    anchored = gpu.waits
    gpu.submit(2.0)
    with pace.communicating() as waits:
        assert waits
        gpu.submit(1.0)
    gpu.submit(0.5)
    pace.leave()
    with pace.communicating() as waits:  # between layers: nobody's time
        assert not waits
        gpu.submit(9.0)
    assert gpu.waits == anchored
    assert pace.take_busy_seconds() == {"forward": pytest.approx(2.5)}
    for found in (None, {"forward": pytest.approx(4.0)}):  # every other step is left alone, and not counted later
        pace.start_step()
        pace.enter(Kind.FORWARD, 0)
        gpu.submit(4.0)
        pace.leave()
        assert pace.take_busy_seconds() == found


def test_spans_are_the_devices_not_the_hosts(monkeypatch):
    gpu = SimulatedGpu(monkeypatch)
    log = SpanLog(3, Device(vendor="amd"))
    log.start_step()
    for kind, seconds in ((Kind.REDUCE, 2.0), (Kind.STEP, 3.0)):
        with log.timed(Action(kind, 0)):
            gpu.submit(seconds)
    first, second = log.spans
    assert (first.start_seconds, first.stop_seconds, second.stop_seconds) == (1000.0, 1002.0, 1005.0)
    assert (first.rank, second.start_seconds) == (3, first.stop_seconds)


def test_a_steps_spans_wait_for_the_device_when_they_are_looked_at(monkeypatch):
    """They are kept from step to step; the host launches the next one while the device still updates."""
    gpu = SimulatedGpu(monkeypatch)
    log = SpanLog(0, Device(vendor="nvidia"))
    kept = []
    for seconds in (2.0, 3.0):
        log.start_step()
        with log.timed(Action(Kind.STEP, 0)):
            gpu.submit(seconds)
        kept.append(log.spans)
    assert gpu.waits == 1  # for the anchor
    assert [span.stop_seconds - span.start_seconds for spans in kept for span in spans] == [2.0, 3.0]


def test_events_far_apart_are_told_from_a_new_anchor(monkeypatch):
    gpu = SimulatedGpu(monkeypatch)
    clock = Clock(Device(vendor="nvidia"))
    clock.stamp()
    gpu.host += Clock.ANCHORED_SECONDS + 1
    late = clock.stamp()
    assert clock.seconds(late) == gpu.host
    assert late.anchored_at == gpu.host


@pytest.mark.parametrize(
    ("replan", "vendor", "pace"),
    [("never", "nvidia", Pace), (None, "nvidia", WatchedPace), ("report", "cpu", WatchedPace), (None, "cpu", Pace)],
)
def test_nothing_is_timed_where_nobody_watches_for_slow_ranks(replan, vendor, pace):
    job: Any = SimpleNamespace(spec=SimpleNamespace(replan=replan))
    world: Any = SimpleNamespace(device=Device(vendor=vendor))
    layout: Any = SimpleNamespace(cluster=SimpleNamespace(emulated=False))
    dataset: Any = None
    assert type(_pace(world, job, dataset, layout, None, 1.0)) is pace
