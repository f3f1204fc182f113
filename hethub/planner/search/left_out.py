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
    """A part of the accelerators to search: the question with these machines, the device types used, and the seconds that a
    plan must take less than."""

    problem: Problem
    device_types: list[int]
    below_seconds: float


def parts(incumbent: Incumbent) -> Iterator[Part]:
    """What may do better alone. Plans that slow links hold up are slower in the mean over the scenarios than as predicted, and
    those of a part that such links lie around are not: these are to be below what the best takes in the middle of the
    scenarios."""
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
    """What gives the seconds that the best plan takes in the middle of the scenarios; infinite where none fits."""
    outlooks = Outlooks(incumbent.problem)

    @cache
    def seconds_of(best: Evaluation) -> float:
        return outlooks.in_the_middle([best.plan])[0]

    return lambda: seconds_of(incumbent.best) if incumbent.best else float("inf")


def fewer_device_types(incumbent: Incumbent) -> Iterator[list[int]]:
    """All but the device types with the least memory, one after the other, as long as no plan is known that fits; then
    without the slowest, the next slowest too, and so on."""
    device_types = incumbent.problem.device_types
    used = sorted(incumbent.problem.usable, key=lambda own: device_types[own].memory_bytes)
    while not incumbent.fitting and len(used) > 1:
        used = used[1:]
        yield used
    rate = incumbent.costs.unit_costs.layer_rate
    used.sort(key=lambda own: (rate(own), -own))  # of equal ones those behind fast interfaces stand first
    yield from (used[first:] for first in range(1, len(used)))


def _first_units(incumbent: Incumbent) -> Iterator[tuple[Problem, list[int]]]:
    """The question with no more accelerators than may all have a layer and a sample, and their types: as many replicas as the
    degrees given ask for times 1, 2, 4, …, the most and fastest first."""
    problem, given = incumbent.problem, incumbent.problem.constraints
    fastest = sorted(problem.usable, key=incumbent.costs.unit_costs.layer_rate, reverse=True)
    units = [unit for device_type in fastest for unit in problem.units(device_type, given.tp or 1)]
    least = (given.pp or 1) * (given.dp or 1)
    for power in reversed(range((len(units) // least).bit_length())):
        first = units[: least << power]
        ranks, used = {rank for unit in first for rank in unit.ranks}, {unit.device_type for unit in first}
        yield _with_ranks(problem, used, ranks), sorted(used)


def _fewer_machines(problem: Problem) -> Iterator[tuple[Problem, list[int]]]:
    """The question with 1, 2, 4, … machines of a device type, and that type: behind slow interfaces the others may cost more
    than they add."""
    for number in problem.usable:
        machines = problem.device_types[number].machines
        for power in range((len(machines) - 1).bit_length()):
            yield _with_ranks(problem, {number}, set(chain(*machines[: 1 << power]))), [number]


def _with_ranks(problem: Problem, used: set[int], ranks: set[int]) -> Problem:
    """The question with no more than these ranks of the device types used."""
    device_types = list(problem.device_types)
    for number in used:
        left = (tuple(filter(ranks.__contains__, machine)) for machine in device_types[number].machines)
        device_types[number] = replace(device_types[number], machines=tuple(filter(None, left)))
    return replace(problem, device_types=tuple(device_types))


def _behind_one_link(problem: Problem) -> list[list[int]]:
    """The device types of each maker and of each region, which the slowest links part from the others, all others, and each
    device type, whose machines alone may have a fast network."""
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
