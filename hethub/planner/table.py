"""All combinations of TP degrees, micro-batches and recompute as arrays, so that thousands are weighed at once."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hethub.planner.costs import UnitCosts
from hethub.planner.footprint import Coefficients
from hethub.planner.problem import Combination, Problem, Unit
from hethub.planner.settings import combinations
from hethub.spec.plan import Recompute


@dataclass(frozen=True, kw_only=True)
class Table:
    """Combinations, the one of the smallest bound first, and the sorts of units that each makes of the cluster.

    Arrays are [combination, sort]; where a combination has fewer sorts than others, the count of the rest is 0.
    """

    combinations: tuple[Combination, ...]
    examples: tuple[tuple[Unit, ...], ...]  # a unit of every sort
    kinds: np.ndarray
    counts: np.ndarray
    layer: np.ndarray  # seconds of one layer per sample
    embedding: np.ndarray  # seconds per sample
    head: np.ndarray
    tile: np.ndarray  # seconds of one layer of one micro-batch
    capacity: np.ndarray  # bytes
    memory: Coefficients  # each [combination, sort, position]
    bound: np.ndarray  # [combination], seconds of perfect balance, which no plan of the combination beats
    through: np.ndarray  # [combination], seconds of one micro-batch through all layers on the fastest sort

    def __len__(self) -> int:
        return len(self.combinations)

    @cached_property
    def units(self) -> np.ndarray:
        """[combination]: how many units it makes of the cluster."""
        found: np.ndarray = self.counts.sum(axis=1)
        return found

    def only(self, rows: np.ndarray | Sequence[int]) -> "Table":
        """Some of the combinations, in the order given."""
        rows = np.asarray(rows, dtype=np.int64)
        arrays = {name: getattr(self, name)[rows] for name in _ARRAYS}
        return Table(
            combinations=tuple(self.combinations[row] for row in rows),
            examples=tuple(self.examples[row] for row in rows),
            memory=Coefficients(*(part[rows] for part in self.memory)),
            **arrays,
        )


_FIGURES = ("layer", "embedding", "head", "tile", "capacity")
_ARRAYS = ("kinds", "counts", *_FIGURES, "bound", "through")


def tabulate(problem: Problem, costs: UnitCosts) -> Table:
    """The table of all combinations that the problem's constraints allow."""
    every = tuple(combinations(problem))
    groups = {degrees: _sorts(problem, degrees) for degrees in dict.fromkeys(c.degrees for c in every)}
    width = max(map(len, groups.values()))
    records = _Records(problem, costs)
    index = np.zeros((len(every), width), dtype=np.int64)  # 0: a blank record
    for row, combination in enumerate(every):
        for sort, (unit, _) in enumerate(groups[combination.degrees]):
            index[row, sort] = records.index(unit, combination.micro_batches[unit.kind], combination.recompute)
    padded = {d: ([u.kind for u, _ in own], [n for _, n in own], width - len(own)) for d, own in groups.items()}
    kinds = np.array([kinds + more * [-1] for kinds, _, more in (padded[c.degrees] for c in every)])
    counts = np.array([counts + more * [0] for _, counts, more in (padded[c.degrees] for c in every)])
    figures = dict(zip(_FIGURES, np.array(records.figures)[index].transpose(2, 0, 1), strict=True))
    present = counts > 0
    rate = np.where(present, counts / figures["layer"], 0.0).sum(axis=1)
    table = Table(
        combinations=every,
        examples=tuple(tuple(unit for unit, _ in groups[c.degrees]) for c in every),
        kinds=kinds,
        counts=counts,
        memory=Coefficients(*(np.array(part)[index] for part in zip(*records.memory, strict=True))),
        bound=problem.batch.global_batch * problem.model.layers / rate,
        through=problem.model.layers * np.where(present, figures["tile"], np.inf).min(axis=1),
        **figures,
    )
    return table.only(np.argsort(table.bound, kind="stable"))


def _sorts(problem: Problem, degrees: tuple[int, ...]) -> list[tuple[Unit, int]]:
    """A unit of every sort and how many there are: a machine's rest beside the units of the wanted degree."""
    found = []
    for kind, tp in enumerate(degrees):
        units = problem.units(kind, tp)
        for size, count in Counter(unit.tp for unit in units).items():
            found.append((next(unit for unit in units if unit.tp == size), count))
    return found


class _Records:
    """Figures and memory of every sort of unit under every micro-batch and recompute, each once; number 0 is blank."""

    def __init__(self, problem: Problem, costs: UnitCosts) -> None:
        self.problem, self.costs = problem, costs
        self.figures: list[tuple[float, ...]] = [(1.0,) * len(_FIGURES)]
        self.memory: list[Coefficients] = [Coefficients(*(np.zeros(4) for _ in Coefficients._fields))]
        self._known: dict[tuple[int, int, int, Recompute], int] = {}

    def index(self, unit: Unit, micro_batch: int, recompute: Recompute) -> int:
        key = (unit.kind, unit.tp, micro_batch, recompute)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = len(self.figures)
            rate = self.costs.rate(unit.kind, unit.tp, micro_batch, recompute)
            layer, embedding, head = (part.total / micro_batch for part in rate)
            self.figures.append((layer, embedding, head, rate.layer.total, self.problem.capacity(unit.kind)))
            self.memory.append(self.problem.coefficients(unit.kind, unit.tp, micro_batch, recompute))
        return found
