"""Which device types a plan may leave unused."""

from collections.abc import Iterator

from hethub.planner.evaluate.incumbent import Incumbent


def fewer_device_types(incumbent: Incumbent) -> Iterator[list[int]]:
    """All but the device types with the least memory, one after the other, as long as no plan is known that fits; then
    without the slowest, the next slowest too, and so on."""
    device_types = incumbent.problem.device_types
    used = sorted(range(len(device_types)), key=lambda own: device_types[own].memory_bytes)
    while not incumbent.fitting and len(used) > 1:
        used = used[1:]
        yield used
    used.sort(key=incumbent.costs.unit_costs.layer_rate)
    while incumbent.fitting and len(used) > 1:
        used = used[1:]
        yield used
