"""What the search enumerates: TP degrees, micro-batches and recompute by kind, and the lines of units that they
form."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import permutations, product
from math import prod

from hethub.planner.problem.problem import Problem, Unit

MOST_ORDERED = 4  # kinds: beyond, only orders by speed and by memory are tried
MOST_DEGREES = 1024  # choices of a TP degree for every kind


@dataclass(frozen=True)
class Line:
    """How units line up into stages of `replicas` each: kind after kind in `order`, or side by side, where every stage
    holds the same mixture of kinds."""

    order: tuple[int, ...]
    replicas: int
    side_by_side: bool = False

    def units(self, problem: Problem, degrees: tuple[int, ...]) -> tuple[Unit, ...]:
        """The units from the first stage to the last."""
        own = [problem.units(kind, degrees[kind]) for kind in self.order]
        if not self.side_by_side:
            return tuple(unit for units in own for unit in units)
        stages = sum(map(len, own)) // self.replicas
        runs = [len(units) // stages for units in own]
        return tuple(
            unit
            for s in range(stages)
            for units, run in zip(own, runs, strict=True)
            for unit in units[s * run : (s + 1) * run]
        )


def main_orders(problem: Problem) -> list[tuple[int, ...]]:
    """Orders by speed and by memory both ways: the first look at every setting."""
    kinds = range(len(problem.kinds))
    precision = problem.batch.precision
    by_speed = sorted(kinds, key=lambda k: problem.kinds[k].accelerator.peak_flops(precision))
    by_memory = sorted(kinds, key=lambda k: problem.kinds[k].memory_bytes)
    return list(dict.fromkeys(tuple(o) for one in (by_speed, by_memory) for o in (one, one[::-1])))


def orders(problem: Problem) -> list[tuple[int, ...]]:
    """All orders of the kinds along the pipeline where they are few, else the main ones and as listed."""
    kinds = tuple(range(len(problem.kinds)))
    if len(kinds) <= MOST_ORDERED:
        return list(permutations(kinds))
    return list(dict.fromkeys([*main_orders(problem), kinds, kinds[::-1]]))


def degrees_by_kind(problem: Problem) -> list[list[int]]:
    """The TP degrees to choose from for each kind, powers of two that its machines can hold."""
    fixed = problem.constraints.tp
    return [[fixed] if fixed else problem.degrees_of(kind) for kind in range(len(problem.kinds))]


def degree_choices(problem: Problem) -> list[tuple[int, ...]]:
    """TP degrees per kind: every choice, or of very many those of one degree for all and one kind with another."""
    own = degrees_by_kind(problem)
    if prod(map(len, own)) <= MOST_DEGREES:
        return list(product(*own))
    alike = [
        tuple(max(d for d in some if d <= most) for some in own) for most in sorted({d for some in own for d in some})
    ]
    others = (
        (*base[:kind], degree, *base[kind + 1 :]) for base in alike for kind, some in enumerate(own) for degree in some
    )
    return list(dict.fromkeys((*alike, *others)))


MOST_UNLIKE = 16  # accelerators: beyond, all kinds start with one micro-batch and differ by local search only
MOST_UNLIKE_KINDS = 7  # the same


def micro_batch_choices(problem: Problem) -> list[tuple[int, ...]]:
    """Micro-batches per kind, none larger than its ranks measured to fit. On small clusters kinds may have unlike ones,
    up to four times apart."""
    kinds, sizes = len(problem.kinds), problem.micro_batches
    if kinds == 1 or kinds > MOST_UNLIKE_KINDS or problem.size > MOST_UNLIKE:
        return _fitting(problem, ((size,) * kinds for size in sizes))
    parts = (1, 2, 4) if kinds == 2 or problem.size <= 4 else (1, 2)
    unlike = (tuple(size // part for part in chosen) for size in sizes for chosen in product(parts, repeat=kinds))
    return _fitting(problem, (choice for choice in unlike if set(choice) <= set(sizes)))


def _fitting(problem: Problem, choices: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return list(dict.fromkeys(tuple(problem.at_most(k, b) for k, b in enumerate(choice)) for choice in choices))
