"""The plan space of a handful of accelerators: ordered partitions of their units into stages."""

from collections.abc import Iterator, Sequence
from itertools import product
from math import comb, prod

from hethub.planner.exhaustive.stages import Shape, count_options, levels, recomputes_under
from hethub.planner.generate.small import ordered_partitions
from hethub.planner.problem.problem import Problem, Unit
from hethub.spec.plan import ScheduleName

MOST_ACCELERATORS, MOST_SAMPLES = 6, 64  # of a space that is searched to its end
MOST_BRANCHES, MOST_POINTS = 4_000, 3e7
MOST_OPTIONS, MOST_BOUNDED = 2_000, 150_000  # of a stage, and branches: many more points, of which bounds leave few


def excess(problem: Problem) -> str | None:
    """What of the space is beyond a limit, in words with both figures; None where it can be searched to its end."""
    if problem.size > MOST_ACCELERATORS:
        return f"{problem.size} accelerators, of at most {MOST_ACCELERATORS}"
    if problem.batch.global_batch > MOST_SAMPLES:
        return f"global_batch {problem.batch.global_batch}, of at most {MOST_SAMPLES}"
    shapes, schedules = list(shapes_of(problem)), len(schedules_of(problem))
    options = {units: count_options(problem, units) for units in {units for shape in shapes for units in shape}}
    branches = [comb(problem.model.layers - 1, len(shape) - 1) for shape in shapes]
    number, most = schedules * sum(branches), MOST_BOUNDED
    if not number:
        return f"no plan {'that uses all accelerators' if schedules else 'of a schedule that is searched to its end'}"
    if max(options.values()) > MOST_OPTIONS:
        points = [count * prod(map(options.__getitem__, shape)) for count, shape in zip(branches, shapes, strict=True)]
        if schedules * sum(points) > MOST_POINTS:
            return f"{schedules * sum(points):.2g} plans, of at most {MOST_POINTS:.2g}"
        most = MOST_BRANCHES
    return f"{number:,} ways to give stages accelerators and layers, of at most {most:,}" if number > most else None


def schedules_of(problem: Problem) -> list[ScheduleName]:
    """The schedules under which a small space is searched."""
    wanted = (problem.schedule, *problem.other_schedules)
    return [name for name in wanted if name in problem.schedules and recomputes_under(name, problem)]


def shapes_of(problem: Problem) -> Iterator[Shape]:
    """All ordered partitions into stages of all ways to group the ranks; equal units are not told apart."""
    for grouping in _groupings(problem):
        sorts: dict[tuple[int, int], list[Unit]] = {}
        for unit in grouping:
            sorts.setdefault((unit.device_type, unit.tp), []).append(unit)
        for composition in ordered_partitions(tuple(map(len, sorts.values()))):
            shape = _assigned(list(sorts.values()), composition)
            if _is_allowed(problem, shape):
                yield shape


def _is_allowed(problem: Problem, shape: Shape) -> bool:
    """Whether there are layers and samples for all, and constraints have nothing against it."""
    replicas = list(map(len, shape))
    return (
        len(shape) <= problem.model.layers
        and max(replicas) <= problem.batch.global_batch
        and problem.allows(replicas)
        and all(levels(problem, units) for units in shape)
        and not problem.forbids_any((unit.device_type for unit in units) for units in shape)
    )


def _groupings(problem: Problem) -> Iterator[list[Unit]]:
    """All ways to group the ranks of every machine, the widest groups first."""
    machines = [
        (index, machine) for index, device_type in enumerate(problem.device_types) for machine in device_type.machines
    ]
    for chosen in product(*(_sizes(len(machine), problem.degrees_of(k)) for k, machine in machines)):
        yield [
            Unit(device_type, machine[sum(sizes[:i]) : sum(sizes[: i + 1])])
            for (device_type, machine), sizes in zip(machines, chosen, strict=True)
            for i in range(len(sizes))
        ]


def _sizes(count: int, degrees: Sequence[int]) -> list[tuple[int, ...]]:
    """All ways to make `count` of degrees, the largest first."""
    if not count:
        return [()]
    able = [degree for degree in degrees if degree <= count]
    return [(d, *rest) for d in able for rest in _sizes(count - d, [other for other in able if other <= d])]


def _assigned(sorts: Sequence[Sequence[Unit]], composition: Sequence[Sequence[int]]) -> Shape:
    """The units of every stage in order of ranks."""
    used = [0] * len(sorts)
    shape = []
    for counts in composition:
        own = [unit for units, at, count in zip(sorts, used, counts, strict=True) for unit in units[at : at + count]]
        used = [at + count for at, count in zip(used, counts, strict=True)]
        shape.append(tuple(sorted(own, key=lambda unit: unit.ranks)))
    return tuple(shape)
