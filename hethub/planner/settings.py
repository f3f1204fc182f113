"""The settings that the search partitions: orders of kinds, TP degrees, micro-batches, recompute, replica counts."""

from collections.abc import Iterator
from functools import reduce
from itertools import permutations, product
from math import gcd

from hethub.planner.partition import Setting
from hethub.planner.problem import Problem, Unit

MOST_ORDERED = 4  # kinds: beyond, only orders by speed and by memory are tried


def orders(problem: Problem) -> list[tuple[int, ...]]:
    """Orders of the kinds along the pipeline: all of them for few kinds, else by speed and by memory both ways."""
    kinds = range(len(problem.kinds))
    if len(problem.kinds) <= MOST_ORDERED:
        return list(permutations(kinds))
    precision = problem.batch.precision
    by_speed = sorted(kinds, key=lambda k: problem.kinds[k].accelerator.peak_flops(precision))
    by_memory = sorted(kinds, key=lambda k: problem.kinds[k].memory_bytes)
    return list(dict.fromkeys(tuple(o) for one in (by_speed, by_memory, kinds) for o in (one, one[::-1])))


def degree_choices(problem: Problem) -> list[tuple[int, ...]]:
    """TP degrees per kind, each a degree that the kind's machines can hold."""
    fixed = problem.constraints.tp
    choices = []
    for kind in problem.kinds:
        widest = max(map(len, kind.machines))
        able = [d for d in problem.degrees if d <= widest and d & (d - 1) == 0] or [1]
        choices.append([fixed] if fixed else able)
    return list(product(*choices))


def lines(problem: Problem, degrees: tuple[int, ...]) -> Iterator[tuple[tuple[Unit, ...], int | None]]:
    """Lines of units with the replicas per stage that they are meant for (None: free).

    Kind after kind, in every order, free or with one number of replicas for all stages; and side by side, where every
    stage holds the same mixture, for each number of stages that divides the units of every kind.
    """
    units = [problem.units(kind, tp) for kind, tp in enumerate(degrees)]
    total = sum(map(len, units))
    dp = problem.constraints.dp
    equal = [dp] if dp else [n for n in range(1, total + 1) if total % n == 0 and total // n <= problem.model.layers]
    for order in orders(problem):
        line = tuple(unit for kind in order for unit in units[kind])
        if dp is None and len(units) > 1:
            yield line, None
        for replicas in equal:
            if total % replicas == 0:
                yield line, replicas
    common = reduce(gcd, map(len, units))
    for stages in range(2, common + 1):
        if common % stages == 0 and len(units) > 1 and dp in (None, total // stages):
            runs = [len(own) // stages for own in units]
            side = (unit for s in range(stages) for own, run in zip(units, runs, strict=True) for unit in own[s * run : (s + 1) * run])
            yield tuple(side), total // stages


def settings(problem: Problem) -> Iterator[Setting]:
    """All settings, each once."""
    seen = set()
    for degrees in degree_choices(problem):
        for line, replicas in lines(problem, degrees):
            if (line, replicas) in seen:
                continue
            seen.add((line, replicas))
            for micro_batch in problem.micro_batches:
                for recompute in problem.recomputes:
                    yield Setting(line, replicas, (micro_batch,) * len(problem.kinds), recompute)  # type: ignore[arg-type]
