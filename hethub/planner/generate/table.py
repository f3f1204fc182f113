"""The combinations that the search enumerates: a TP degree and micro-batch for each device type, and recompute. They are
arrays, so that thousands are estimated at once."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np

from hethub.planner.estimate.costs import UnitCosts
from hethub.planner.estimate.memory_model import Coefficients
from hethub.planner.estimate.memory_probes import Mode
from hethub.planner.problem.problem import Combination, Problem, Unit
from hethub.spec.plan import Recompute

MOST_DEGREES = 1024  # choices of a TP degree for every device type


def orders(problem: Problem, used: Collection[int]) -> list[tuple[int, ...]]:
    """Return the orders of device types along the pipeline that are tried: by speed and by memory, ascending and descending."""
    device_types = sorted(used)
    precision = problem.batch.precision
    by_speed = sorted(device_types, key=lambda k: problem.device_types[k].accelerator.peak_flops(precision))
    by_memory = sorted(device_types, key=lambda k: problem.device_types[k].memory_bytes)
    return list(dict.fromkeys(tuple(o) for one in (by_speed, by_memory) for o in (one, one[::-1])))


def degrees_by_device_type(problem: Problem, used: Collection[int]) -> list[list[int]]:
    """Return the TP degrees to choose from for each device type: powers of two that its machines can hold, or only 0 where it
    is not used."""
    every = range(len(problem.device_types))
    return [problem.degrees_of(device_type) if device_type in used else [0] for device_type in every]


def degree_choices(own: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return choices of one TP degree for each device type. Where there are more than MOST_DEGREES, return only those with
    the same degree for all, or for all but one."""
    if prod(map(len, own)) <= MOST_DEGREES:
        return list(product(*own))
    every = sorted({degree for some in own for degree in some if degree})
    alike = [tuple(max((d for d in some if d <= most), default=0) for some in own) for most in every]
    others = (
        (*base[:device_type], degree, *base[device_type + 1 :])
        for base in alike
        for device_type, some in enumerate(own)
        for degree in some
    )
    return list(dict.fromkeys((*alike, *others)))


MOST_UNLIKE = 16  # accelerators: beyond, all device types start with one micro-batch and differ by local search only
MOST_UNLIKE_TYPES = 7  # the same


def micro_batch_choices(problem: Problem, used: Collection[int]) -> list[tuple[int, ...]]:
    """Return choices of one micro-batch for each device type, 0 where it is not used, and none larger than its ranks measured
    to fit. On small clusters the micro-batches of device types may differ, up to four times."""
    number, sizes = len(used), problem.micro_batches
    if number == 1 or number > MOST_UNLIKE_TYPES or problem.size > MOST_UNLIKE:
        return _fitting(problem, used, ((size,) * number for size in sizes))
    parts = (1, 2, 4) if number == 2 or problem.size <= 4 else (1, 2)
    unlike = (tuple(size // part for part in chosen) for size in sizes for chosen in product(parts, repeat=number))
    return _fitting(problem, used, (choice for choice in unlike if set(choice) <= set(sizes)))


def _fitting(problem: Problem, used: Collection[int], choices: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    named = (dict(zip(sorted(used), choice, strict=True)) for choice in choices)
    every = range(len(problem.device_types))
    return list(dict.fromkeys(tuple(problem.at_most(k, own.get(k, 0)) for k in every) for own in named))


@dataclass(frozen=True, kw_only=True)
class Table:
    """Combinations, the one with the smallest bound first, and the sorts of units into which each divides the cluster.

    Arrays are [combination, sort]. A combination with fewer sorts than others is filled up with sorts of count 0.
    """

    used: frozenset[int]  # device types
    combinations: tuple[Combination, ...]
    examples: tuple[tuple[Unit, ...], ...]  # a unit of every sort
    device_types: np.ndarray
    counts: np.ndarray
    layer: np.ndarray  # seconds of one layer per sample
    embedding: np.ndarray  # seconds per sample
    head: np.ndarray
    microbatch: np.ndarray  # seconds of one layer of one micro-batch
    capacity: np.ndarray  # bytes
    memory: Coefficients  # each [combination, sort, position]
    bound: np.ndarray  # [combination], seconds of perfect balance, which no plan of the combination beats
    through: np.ndarray  # [combination], seconds of one micro-batch through all layers on the fastest sort
    memory_counts: bool = True  # else what is generated may need any

    @cached_property
    def units(self) -> np.ndarray:
        """The number of units of each combination."""
        return self.counts.sum(axis=1)

    def only(self, rows: np.ndarray | Sequence[int]) -> "Table":
        """Return a table of these combinations, in the order given."""
        rows = np.asarray(rows, dtype=np.int64)
        arrays = {name: getattr(self, name)[rows] for name in _ARRAYS}
        return replace(
            self,
            combinations=tuple(self.combinations[row] for row in rows),
            examples=tuple(self.examples[row] for row in rows),
            memory=Coefficients(*(part[rows] for part in self.memory)),
            **arrays,
        )


_FIGURES = ("layer", "embedding", "head", "microbatch", "capacity")
_ARRAYS = ("device_types", "counts", *_FIGURES, "bound", "through")


class _Sort(NamedTuple):
    """Units of a device type that are alike: one of them, their number, and the index of their record under each setting."""

    example: Unit
    number: int
    records: list[int]


def tabulate(problem: Problem, costs: UnitCosts, used: Collection[int] | None = None) -> Table:
    """Return the table of all combinations that the problem's constraints allow. `used` are the device types they use, or all
    usable ones where none are named."""
    used = problem.usable if used is None else used
    settings = tuple(product(micro_batch_choices(problem, used), problem.recomputes))
    every = degree_choices(degrees_by_device_type(problem, used))
    figures_of, memory_of = [(1.0,) * len(_FIGURES)], [Coefficients(*(np.zeros(4) for _ in Coefficients._fields))]

    @cache
    def record(device_type: int, tp: int, micro_batch: int, recompute: Recompute) -> int:
        """Compute a unit's figures and memory, and return their index; index 0 is blank."""
        rate = costs.rate(device_type, tp, micro_batch, recompute)
        layer, embedding, head = (part.total / micro_batch for part in rate)
        figures_of.append((layer, embedding, head, rate.layer.total, problem.capacity(device_type)))
        memory_of.append(costs.coefficients(device_type, tp, micro_batch, Mode(recompute, problem.usual_zero)))
        return len(memory_of) - 1

    @cache
    def sorts(device_type: int, tp: int) -> list[_Sort]:
        """Return the sorts of units into which a degree divides a device type: those of this degree, and what is left of a
        machine."""
        alike: dict[int, list[Unit]] = {}
        for unit in problem.units(device_type, tp) if tp else ():
            alike.setdefault(unit.tp, []).append(unit)
        return [
            _Sort(own[0], len(own), [record(device_type, size, sizes[device_type], mode) for sizes, mode in settings])
            for size, own in alike.items()
        ]

    groups = [[sort for device_type, tp in enumerate(degrees) for sort in sorts(device_type, tp)] for degrees in every]
    width = max(map(len, groups))
    device_types, counts = np.full((len(every), width), -1), np.zeros((len(every), width), dtype=np.int64)
    numbered = np.zeros((len(every), len(settings), width), dtype=np.int64)
    for row, group in enumerate(groups):
        for place, (example, number, own) in enumerate(group):
            device_types[row, place], counts[row, place], numbered[row, :, place] = example.device_type, number, own
    index, counts = numbered.reshape(-1, width), counts.repeat(len(settings), axis=0)
    figures = dict(zip(_FIGURES, np.array(figures_of)[index].transpose(2, 0, 1), strict=True))
    present = counts > 0
    rate = np.where(present, counts / figures["layer"], 0.0).sum(axis=1)
    table = Table(
        used=frozenset(used),
        combinations=tuple(Combination(degrees, *setting) for degrees in every for setting in settings),
        examples=tuple(own for group in groups for own in [tuple(sort.example for sort in group)] * len(settings)),
        device_types=device_types.repeat(len(settings), axis=0),
        counts=counts,
        memory=Coefficients(*(np.array(part)[index] for part in zip(*memory_of, strict=True))),
        bound=problem.batch.global_batch * problem.model.layers / rate,
        through=problem.model.layers * np.where(present, figures["microbatch"], np.inf).min(axis=1),
        **figures,
    )
    return table.only(np.argsort(table.bound, kind="stable"))
