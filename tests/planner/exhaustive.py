"""The whole plan grid of a small cluster, searched to its end: what `auto` is compared with.

Grid: ordered partitions of the ranks into stages, TP 1 and 2 inside machines, cuts of the layers, micro-batch 1, 2 or 4
per replica, recompute per stage, ZeRO 0 or 1 per stage, samples in steps of one. A plan is at least as long as its
busiest replica works, so what already exceeds the best plan known is counted and left out: the optimum stays exact.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise, product
from math import comb, prod

from hethub.planner.costs import UnitCosts
from hethub.planner.problem import Problem, Unit
from hethub.predictor import predict
from hethub.spec.errors import BadInput
from hethub.spec.layout import bind
from hethub.spec.plan import PlanSpec, ReplicaSpec, StageSpec

MICRO_BATCHES = (1, 2, 4)


@dataclass
class Outcome:
    """The best plan of the grid, its step, and how many points it has and how many were predicted."""

    seconds: float = float("inf")
    plan: PlanSpec | None = None
    points: int = 0
    predicted: int = 0


@dataclass(frozen=True)
class Option:
    """What one stage may do, with the seconds that its busiest replica works."""

    busy: float
    shortest: float  # its shortest tile, forward and backward
    micro_batches: tuple[int, ...]
    samples: tuple[int, ...]
    recompute: str


def exhaustive(problem: Problem, start: float = float("inf")) -> Outcome:
    """The grid's optimum. `start` is a step already known to be reachable; nothing slower is looked at."""
    outcome, costs = Outcome(seconds=start), UnitCosts(problem)
    for units in _groupings(problem):
        for stages in _ordered_partitions(tuple(units)):
            if len(stages) <= problem.model.layers and max(map(len, stages)) <= problem.batch.global_batch:
                for layers in _cuts(problem.model.layers, len(stages)):
                    _search(problem, costs, stages, layers, outcome)
    return outcome


def _groupings(problem: Problem) -> Iterator[list[Unit]]:
    """All ways to pair ranks of a machine (neighbours) or leave them single."""
    machines = [(k, machine) for k, kind in enumerate(problem.kinds) for machine in kind.machines]
    choices = []
    for kind, machine in machines:
        singles = [Unit(kind, (rank,)) for rank in machine]
        options = [singles]
        if len(machine) == 2 and 2 in problem.degrees:
            options.append([Unit(kind, machine)])
        choices.append(options)
    for chosen in product(*choices):
        yield [unit for units in chosen for unit in units]


def _ordered_partitions(units: tuple[Unit, ...]) -> Iterator[tuple[tuple[Unit, ...], ...]]:
    if not units:
        yield ()
        return
    for size in range(1, len(units) + 1):
        for stage in combinations(units, size):
            rest = tuple(unit for unit in units if unit not in stage)
            for tail in _ordered_partitions(rest):
                yield (stage, *tail)


def _cuts(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, layers), stages - 1):
        edges = (0, *cuts, layers)
        yield tuple(b - a for a, b in pairwise(edges))


def _search(
    problem: Problem, costs: UnitCosts, stages: tuple[tuple[Unit, ...], ...], layers: tuple[int, ...], outcome: Outcome
) -> None:
    last = len(stages) - 1
    options = [
        _options(problem, costs, units, x, s == 0, s == last)
        for s, (units, x) in enumerate(zip(stages, layers, strict=True))
    ]
    zeros = [_zeros(problem, units) for units in stages]
    batch = problem.batch.global_batch
    outcome.points += prod(
        2 * len(MICRO_BATCHES) ** len(units) * comb(batch - 1, len(units) - 1) * len(zero)
        for units, zero in zip(stages, zeros, strict=True)
    )
    able = [[option for option in own if option.busy < outcome.seconds] for own in options]
    for chosen in product(*able):
        if _bound(chosen) >= outcome.seconds:
            continue
        for zero in product(*zeros):
            _predict(problem, stages, layers, chosen, zero, outcome)


def _bound(chosen: tuple[Option, ...]) -> float:
    """No plan is shorter: before a stage starts, a tile has passed those above it, and returns through them at the end."""
    fill = bound = 0.0
    for option in chosen:
        bound = max(bound, fill + option.busy)
        fill += option.shortest
    return bound


def _options(
    problem: Problem, costs: UnitCosts, units: tuple[Unit, ...], layers: int, first: bool, last: bool
) -> list[Option]:
    """All choices of a stage, shortest busy time first. Micro-batches beyond a replica's samples are the same plan."""
    batch = problem.batch.global_batch
    found = []
    for recompute in ("none", "full"):
        tiles = [
            [costs.rate(u.kind, u.tp, b, recompute).tile(layers, first, last).total for b in range(1, 5)] for u in units
        ]
        for cuts in combinations(range(1, batch), len(units) - 1):
            edges = (0, *cuts, batch)
            samples = tuple(b - a for a, b in pairwise(edges))
            for micro_batches in product(MICRO_BATCHES, repeat=len(units)):
                if any(b > n for b, n in zip(micro_batches, samples, strict=True)):
                    continue
                busy = max(
                    (n // b) * own[b - 1] + (own[n % b - 1] if n % b else 0.0)
                    for own, b, n in zip(tiles, micro_batches, samples, strict=True)
                )
                shortest = min(own[(n % b or b) - 1] for own, b, n in zip(tiles, micro_batches, samples, strict=True))
                found.append(Option(busy, shortest, micro_batches, samples, recompute))
    return sorted(found, key=lambda option: option.busy)


def _zeros(problem: Problem, units: tuple[Unit, ...]) -> tuple[int, ...]:
    islands = {problem.kinds[unit.kind].island for unit in units}
    return (0,) if len(units) == 1 else (1,) if len(islands) > 1 else (0, 1)


def _predict(
    problem: Problem,
    stages: tuple[tuple[Unit, ...], ...],
    layers: tuple[int, ...],
    chosen: tuple[Option, ...],
    zeros: tuple[int, ...],
    outcome: Outcome,
) -> None:
    start, specs = 0, []
    for units, x, option, zero in zip(stages, layers, chosen, zeros, strict=True):
        replicas = tuple(
            ReplicaSpec(ranks=u.ranks, micro_batch=b, samples=n)
            for u, b, n in zip(units, option.micro_batches, option.samples, strict=True)
        )
        specs.append(StageSpec(layers=((start, start + x),), replicas=replicas, zero=zero, recompute=option.recompute))
        start += x
    plan = PlanSpec(
        model=problem.model.name,
        cluster=problem.cluster.name,
        global_batch=problem.batch.global_batch,
        seq_len=problem.batch.seq_len,
        precision=problem.batch.precision,
        stages=tuple(specs),
    )
    try:
        layout = bind(plan, problem.model, problem.cluster)
    except BadInput:
        return
    outcome.predicted += 1
    prediction = predict(layout, reserve=problem.constraints.reserve)
    if prediction.fits and prediction.step_seconds < outcome.seconds:
        outcome.seconds, outcome.plan = prediction.step_seconds, plan
