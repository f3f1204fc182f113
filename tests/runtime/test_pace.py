"""A real device's pace: what it times, and which updates count with which step."""

from hethub.kernels.device import Device
from hethub.runtime.pace import WatchedPace
from hethub.spec.layout.execution import Kind


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
