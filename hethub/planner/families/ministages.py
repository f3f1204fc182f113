"""Zorse's ministages: every group of accelerators holds several chunks of layers, and all tiles pass one before the next.

With ZeRO-2 inside a group and, where memory asks for it, parameters or optimizer state in host memory: what is resident
is then a chunk or two, not the stage.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, islice

from hethub.planner import samples as division
from hethub.planner.costs import UnitCosts
from hethub.planner.draft import Draft, DraftStage, seat_units
from hethub.planner.families.whole import WholeStage, Worker, draft_of, levels, memory_of, offers
from hethub.planner.footprint import MIDDLE
from hethub.planner.problem import Problem
from hethub.planner.surrogate import Surrogate
from hethub.spec.plan import Offload
from hethub.spec.ranges import split

CHUNKS = (2, 4, 8)
MOST_DRAFTS = 3  # made into plans: the bound that ranks them knows no gathers
DIVISION_ERR = 2  # samples of a replica more or fewer than estimated
OFFLOADS: tuple[tuple[Offload, ...], ...] = ((), ("parameters",), ("parameters", "optimizer"))


def drafts(
    problem: Problem, surrogate: Surrogate, plain: Sequence[Draft], limit_seconds: float = float("inf")
) -> Iterator[Draft]:
    """The family's plain drafts that take least at least, of those that fit with their stages in chunks, their state
    sharded, and offloaded as far as memory asks for it; none that must take as long as the limit."""
    if not offers(problem, "ministages"):
        return
    zero = max((z for z in levels(problem) if z <= 2), default=0)
    near = [draft for draft in plain if _most_chunks(draft) and surrogate.least(draft) < limit_seconds]
    least = {draft: surrogate.least_in_passes(draft) for draft in near}
    ranked = sorted((draft for draft in least if least[draft] < limit_seconds), key=lambda draft: least[draft])
    made = (_in_chunks(problem, surrogate, draft, zero) for draft in ranked)
    yield from islice((draft for draft in made if draft is not None), MOST_DRAFTS)


def _most_chunks(draft: Draft) -> int:
    """Into how many chunks the shortest stage can be cut; 0 where into none."""
    return max((chunks for chunks in CHUNKS if chunks <= min(stage.layers for stage in draft.stages)), default=0)


def _in_chunks(problem: Problem, surrogate: Surrogate, draft: Draft, zero: int) -> Draft | None:
    """The draft in the fewest chunks with which it fits; None where it does in none."""
    most = _most_chunks(draft)
    able = [chunks for chunks in CHUNKS if chunks <= most and _may_fit(surrogate, draft, chunks)]
    workers = _workers(draft, problem, surrogate.costs) if able else None
    if workers is None:
        return None
    tried = (_thriftily(problem, draft, workers, chunks, zero) for chunks in able)
    return next((chosen for chosen in tried if chosen is not None), None)


def _may_fit(surrogate: Surrogate, draft: Draft, chunks: int) -> bool:
    """Whether every rank has room, whatever is offloaded, for what layers keep of all samples, with weights and gradients
    of the topmost chunk at hand when its first tile has gone down through it."""
    problem = surrogate.problem
    state = problem.model.layer_parameters * (surrogate.costs.width + max(4, surrogate.costs.width))
    for index, stage in enumerate(draft.stages):
        top = stage.layers // chunks
        for own, samples in zip(stage.seats, surrogate.samples(draft, index), strict=True):
            at = problem.coefficients(own.kind, 1, own.micro_batch, stage.recompute)
            tiles = max(samples - DIVISION_ERR, 1) / own.micro_batch
            kept = at.layer_tile[MIDDLE] * (stage.layers * tiles - top)
            if at.once[MIDDLE] + kept + top * state > problem.capacity(own.kind):
                return False
    return True


def _thriftily(
    problem: Problem, draft: Draft, workers: Sequence[Sequence[Worker]], chunks: int, zero: int
) -> Draft | None:
    """The draft in chunks with the least offloading that fits; None where none does."""
    layers = _chunks([stage.layers for stage in draft.stages], chunks)
    for offload in OFFLOADS:
        stages = [
            WholeStage(own, loads, zero, stage.recompute, offload)
            for stage, own, loads in zip(draft.stages, layers, workers, strict=True)
        ]
        if set(offload) <= set(problem.capabilities.offload):
            whole = draft_of(problem, f"zorse {draft.shape} in {chunks} {offload}", "ministages", stages)
            assert whole.plan is not None
            if all(entry.fits(problem.constraints.reserve) for entry in memory_of(problem, whole.plan)):
                return whole
    return None


def _workers(draft: Draft, problem: Problem, costs: UnitCosts) -> list[list[Worker]] | None:
    """Per stage, its ranks with samples for their speed; None where they cannot be seated."""
    seated = seat_units(draft, problem)
    if seated is None or max(draft.replica_counts) > problem.batch.global_batch:
        return None
    found = []
    for stage, own in zip(draft.stages, seated, strict=True):
        curves = {sort: _curve(stage, *sort, costs) for sort in {(unit.kind, b) for unit, b in own}}
        divided = division.divide(problem.batch.global_batch, [curves[unit.kind, b] for unit, b in own])
        found.append([Worker(unit.kind, unit.ranks[0], b, n) for (unit, b), n in zip(own, divided, strict=True)])
    return found


def _curve(stage: DraftStage, kind: int, micro_batch: int, costs: UnitCosts) -> division.Worker:
    rates = (costs.rate(kind, 1, b, stage.recompute) for b in range(1, micro_batch + 1))
    tiles = accumulate((rate.tile(stage.layers, False, False).total for rate in rates), max)
    return division.Worker(micro_batch, tuple(tiles))


def _chunks(layers: Sequence[int], chunks: int) -> list[tuple[tuple[int, int], ...]]:
    """Per stage its chunks [start, stop), chunk by chunk over the stages."""
    sizes = [[part.size for part in split(own, chunks)] for own in layers]
    found: list[list[tuple[int, int]]] = [[] for _ in layers]
    start = 0
    for chunk in range(chunks):
        for stage, own in enumerate(sizes):
            found[stage].append((start, start + own[chunk]))
            start += own[chunk]
    return [tuple(own) for own in found]
