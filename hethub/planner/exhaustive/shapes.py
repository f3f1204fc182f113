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


def is_tiny(problem: Problem) -> bool:
    """Whether the space is small enough to be searched to its end."""
    if problem.size > MOST_ACCELERATORS or problem.batch.global_batch > MOST_SAMPLES:
        return False
    shapes, schedules = list(shapes_of(problem)), len(schedules_of(problem))
    options = {units: count_options(problem, units) for units in {units for shape in shapes for units in shape}}
    branches = [comb(problem.model.layers - 1, len(shape) - 1) for shape in shapes]
    if max(options.values(), default=0) <= MOST_OPTIONS:
        return 0 < schedules * sum(branches) <= MOST_BOUNDED
    points = [number * prod(map(options.__getitem__, shape)) for number, shape in zip(branches, shapes, strict=True)]
    return 0 < schedules * sum(points) <= MOST_POINTS and schedules * sum(branches) <= MOST_BRANCHES


def schedules_of(problem: Problem) -> list[ScheduleName]:
    """The schedules under which a small space is searched."""
    able = ("1f1b", "gpipe", "zero_bubble")
    wanted = [name for name in (problem.schedule, *problem.other_schedules) if name in able]
    return [name for name in wanted if recomputes_under(name, problem)]


def shapes_of(problem: Problem) -> Iterator[Shape]:
    """All ordered partitions into stages of all ways to group the ranks; equal units are not told apart."""
    for grouping in _groupings(problem):
        sorts: dict[tuple[int, int], list[Unit]] = {}
        for unit in grouping:
            sorts.setdefault((unit.kind, unit.tp), []).append(unit)
        for composition in ordered_partitions(tuple(map(len, sorts.values()))):
            shape = _assigned(list(sorts.values()), composition)
            if _is_allowed(problem, shape):
                yield shape


def _is_allowed(problem: Problem, shape: Shape) -> bool:
    """Whether there are layers and samples for all, and constraints have nothing against it."""
    given, widths = problem.constraints, set(map(len, shape))
    return (
        len(shape) <= problem.model.layers
        and max(widths) <= problem.batch.global_batch
        and given.pp in (None, len(shape))
        and (given.dp is None or widths == {given.dp})
        and all(levels(problem, units) for units in shape)
        and not problem.forbids_any((unit.kind for unit in units) for units in shape)
    )


def _groupings(problem: Problem) -> Iterator[list[Unit]]:
    """All ways to group the ranks of every machine, the widest groups first."""
    machines = [(index, machine) for index, kind in enumerate(problem.kinds) for machine in kind.machines]
    wanted = problem.constraints.tp
    for chosen in product(*(_sizes(len(machine), problem.degrees_of(kind)) for kind, machine in machines)):
        if wanted is None or {size for sizes in chosen for size in sizes} == {wanted}:
            yield [
                Unit(kind, machine[sum(sizes[:i]) : sum(sizes[: i + 1])])
                for (kind, machine), sizes in zip(machines, chosen, strict=True)
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
