"""Which device types, and which machines of one, a plan may leave unused."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from hethub.planner.evaluate.incumbent import Incumbent
from hethub.planner.problem.problem import Problem


def fewer_device_types(incumbent: Incumbent) -> Iterator[list[int]]:
    """All but the device types with the least memory, one after the other, as long as no plan is known that fits; then
    without the slowest, the next slowest too, and so on; then those of one maker and of one region."""
    device_types = incumbent.problem.device_types
    used = sorted(range(len(device_types)), key=lambda own: device_types[own].memory_bytes)
    while not incumbent.fitting and len(used) > 1:
        used = used[1:]
        yield used
    used.sort(key=incumbent.costs.unit_costs.layer_rate)
    faster = [used[first:] for first in range(1, len(used))]
    unlike = dict.fromkeys(tuple(sorted(own)) for own in [*faster, *_behind_one_link(incumbent.problem)])
    yield from map(list, unlike)


def fewer_machines(incumbent: Incumbent) -> Iterator[tuple[Problem, int]]:
    """The question with 1, 2, 4, … machines of a device type, which is to be looked at alone: behind slow interfaces the
    others may cost more than they add. None of which perfect balance would be slower than the best plan known."""
    problem, global_batch = incumbent.problem, incumbent.problem.batch.global_batch
    for number, device_type in enumerate(problem.device_types):
        machines = device_type.machines
        seconds = (
            global_batch / (device_type.size * incumbent.costs.unit_costs.layer_rate(number)) * problem.model.layers
        )
        for few in (1 << power for power in range((len(machines) - 1).bit_length())):
            if seconds * len(machines) / few < incumbent.best_seconds:
                part = replace(device_type, machines=machines[:few])
                others = problem.device_types[:number], problem.device_types[number + 1 :]
                yield replace(problem, device_types=(*others[0], part, *others[1])), number


def _behind_one_link(problem: Problem) -> list[list[int]]:
    """The device types of each maker and of each region, which the slowest links part from the others."""
    regions, groups = problem.cluster.links.regions, defaultdict[tuple[str, str], list[int]](list)
    for number, device_type in enumerate(problem.device_types):
        groups["maker", device_type.island].append(number)
        if regions:
            node = problem.cluster.places[device_type.ranks[0]].node
            groups["region", regions.of_node[node.name]].append(number)
    return [list(own) for own in dict.fromkeys(map(tuple, groups.values())) if len(own) < len(problem.device_types)]
