"""Which device types, and which machines of one, a plan may leave unused."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import NamedTuple

from hethub.planner.evaluate.evaluator import Evaluation
from hethub.planner.evaluate.incumbent import Incumbent
from hethub.planner.evaluate.outlook import Outlooks
from hethub.planner.problem.problem import Problem


class Part(NamedTuple):
    """A part of the accelerators to search: the question with these machines, the device types in use, and the seconds below
    which a plan must stay to be better."""

    problem: Problem
    device_types: list[int]
    below_seconds: float


def parts(incumbent: Incumbent) -> Iterator[Part]:
    """Yield the parts of the accelerators that may do better alone.

    A plan that a slow link holds up is slower in the mean over the scenarios than its point prediction. A part without that
    link is not, so its plans have to beat the best plan's step in the middle scenario only."""
    problem, alone, middle = incumbent.problem, _behind_one_link(incumbent.problem), _in_the_middle(incumbent)
    for used in fewer_device_types(incumbent):
        if sorted(used) not in alone or not incumbent.fitting:
            yield Part(problem, used, incumbent.best_seconds)
    for used in alone:
        yield Part(problem, used, middle())
    for few in _first_units(incumbent) if not incumbent.fitting else ():
        if not incumbent.fitting:
            yield Part(*few, middle())
    if incumbent.fitting:
        yield from (Part(*some, middle()) for some in _fewer_machines(problem))


def _in_the_middle(incumbent: Incumbent) -> Callable[[], float]:
    """Return a function that gives the present best plan's seconds in the middle scenario; infinite where no plan fits."""
    outlooks = Outlooks(incumbent.problem)

    @cache
    def seconds_of(best: Evaluation) -> float:
        return outlooks.in_the_middle([best.plan])[0]

    return lambda: seconds_of(incumbent.best) if incumbent.best else float("inf")


def fewer_device_types(incumbent: Incumbent) -> Iterator[list[int]]:
    """Yield sets of device types. As long as no plan fits: without the type with the least memory, then without the next one,
    and so on. After that: without the slowest, then without the next slowest, and so on."""
    device_types = incumbent.problem.device_types
    used = sorted(incumbent.problem.usable, key=lambda own: device_types[own].memory_bytes)
    while not incumbent.fitting and len(used) > 1:
        used = used[1:]
        yield used
    rate = incumbent.costs.unit_costs.layer_rate
    used.sort(key=lambda own: (rate(own), -own))  # of equally fast types, those behind fast interfaces come first
    yield from (used[first:] for first in range(1, len(used)))


def _first_units(incumbent: Incumbent) -> Iterator[tuple[Problem, list[int]]]:
    """Yield the question with only the fastest accelerators, and their types: 1, 2, 4, … times as many replicas as the given
    degrees ask for, the largest number first. It is for clusters with too many accelerators to give each a layer and a sample."""
    problem, given = incumbent.problem, incumbent.problem.constraints
    fastest = sorted(problem.usable, key=incumbent.costs.unit_costs.layer_rate, reverse=True)
    units = [unit for device_type in fastest for unit in problem.units(device_type, given.tp or 1)]
    least = (given.pp or 1) * (given.dp or 1)
    for power in reversed(range((len(units) // least).bit_length())):
        first = units[: least << power]
        ranks, used = {rank for unit in first for rank in unit.ranks}, {unit.device_type for unit in first}
        yield _with_ranks(problem, used, ranks), sorted(used)


def _fewer_machines(problem: Problem) -> Iterator[tuple[Problem, list[int]]]:
    """Yield the question with 1, 2, 4, … machines of one device type, and that type: behind slow interfaces more machines may
    cost more than they add."""
    for number in problem.usable:
        machines = problem.device_types[number].machines
        for power in range((len(machines) - 1).bit_length()):
            yield _with_ranks(problem, {number}, set(chain(*machines[: 1 << power]))), [number]


def _with_ranks(problem: Problem, used: set[int], ranks: set[int]) -> Problem:
    """Return the question with only these ranks of the device types `used`."""
    device_types = list(problem.device_types)
    for number in used:
        left = (tuple(filter(ranks.__contains__, machine)) for machine in device_types[number].machines)
        device_types[number] = replace(device_types[number], machines=tuple(filter(None, left)))
    return replace(problem, device_types=tuple(device_types))


def _behind_one_link(problem: Problem) -> list[list[int]]:
    """Return the sets of device types that one slow link may part from the rest: each maker's and each region's types, all
    types but these, and each type alone."""
    regions, groups = problem.cluster.links.regions, defaultdict[tuple[str, str], list[int]](list)
    every = problem.usable
    for number in every:
        device_type = problem.device_types[number]
        groups["maker", device_type.island].append(number)
        if regions:
            node = problem.cluster.places[device_type.ranks[0]].node
            groups["region", regions.of_node[node.name]].append(number)
    others = [[number for number in every if number not in own] for own in groups.values()]
    unlike = dict.fromkeys(map(tuple, [*groups.values(), *others, *([number] for number in every)]))
    return [list(own) for own in unlike if 0 < len(own) < len(every)]
