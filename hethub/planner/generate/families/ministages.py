"""Zorse's ministages: every group of accelerators holds several chunks of layers, and all microbatches pass one before
the next.

With ZeRO-2 inside a group and, where memory asks for it, what layers keep, parameters or optimizer state in host
memory: what is resident is then a chunk or two, not the stage.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, takewhile
from typing import NamedTuple

from hethub.planner.candidate import samples as division
from hethub.planner.candidate.candidate import Draft, DraftStage, Seats, seat_units
from hethub.planner.estimate.costs import UnitCosts
from hethub.planner.estimate.estimator import Surrogate
from hethub.planner.estimate.memory_model import MIDDLE
from hethub.planner.generate.families.whole import WholeStage, Worker, draft_of, fits, levels, offers
from hethub.planner.problem.problem import Problem
from hethub.predictor.cost.links import host_gbytes_per_second
from hethub.spec.plan import Offload, Recompute
from hethub.spec.ranges import split

MOST_DRAFTS = 3  # that fit
MOST_TRIED = 12  # in the order of rough estimates, for memory
FAR = 1.5  # times the limit: of 335 plans on seven clusters none was estimated to take more than 1.42 times its prediction
MOST_CHUNKS = 16  # of a stage: beyond, what is resident hardly falls
DIVISION_ERR = 2  # samples of a replica more or fewer than estimated
OFFLOADS: dict[Recompute, tuple[tuple[Offload, ...], ...]] = {
    "none": ((), ("parameters",), ("parameters", "optimizer")),
    "selective": ((), ("parameters",), ("parameters", "optimizer")),
    # Layers' inputs alone are few enough for the way to the host.
    "full": ((), ("activations",), ("activations", "parameters"), ("activations", "parameters", "optimizer")),
}


def drafts(
    problem: Problem, surrogate: Surrogate, plain: Sequence[Draft], limit_seconds: float = float("inf")
) -> Iterator[Draft]:
    """The family's plain drafts with their stages in chunks, those first that by a rough estimate take least; of those
    that fit, offloaded as far as memory asks for it; none that must take as long as the limit or is estimated far
    beyond it."""
    if not offers(problem, "ministages"):
        return
    zero = max((z for z in levels(problem) if z <= 2), default=0)
    near = (draft for draft in plain if _most_chunks(draft) > 1 and surrogate.least(draft) < limit_seconds)
    able = ((draft, chunks) for draft in near for chunks in _able(surrogate, draft))
    paces = _Paces(surrogate)
    options = [
        (paces.seconds(draft, chunks), draft, chunks)
        for draft, chunks in able
        if surrogate.least_in_passes(draft) < limit_seconds
    ]
    near_enough = (option for option in options if option[0] < FAR * limit_seconds)
    ranked = sorted(near_enough, key=lambda option: option[0])
    found: dict[object, tuple[float, Draft]] = {}  # the best of every arrangement: estimates are no better than that
    for seconds, draft, chunks in ranked[:MOST_TRIED]:
        if found.get(draft.shape, (seconds + 1.0,))[0] <= seconds:
            continue
        made = _in_chunks(problem, surrogate.costs, draft, chunks, zero)
        if made is not None:
            offered = (seconds + paces.offloading_seconds(draft, made), made)
            found[draft.shape] = min(found.get(draft.shape, offered), offered, key=lambda entry: entry[0])
    yield from (draft for _, draft in sorted(found.values(), key=lambda entry: entry[0])[:MOST_DRAFTS])


def _most_chunks(draft: Draft) -> int:
    """Into how many chunks the stages are cut at most."""
    return min(MOST_CHUNKS, *(stage.layers for stage in draft.stages))


class _Pace(NamedTuple):
    """Seconds of a stage's layer: of all microbatches on the busiest replica, of one microbatch, and of its
    collectives."""

    compute: float
    microbatch: float
    collective: float


class _Paces:
    """Rough estimates of drafts in chunks, by what their stages' layers take."""

    def __init__(self, surrogate: Surrogate) -> None:
        self._surrogate, self._costs = surrogate, surrogate.costs
        self._collectives: dict[tuple[Seats, ...], float] = {}

    def seconds(self, draft: Draft, chunks: int) -> float:
        """Chunk after chunk at the pace of the slowest stage, whose sums come behind its microbatches, and a
        microbatch through all."""
        found = [self._pace(draft, index) for index in range(len(draft.stages))]
        sizes = [[part.size for part in split(stage.layers, chunks)] for stage in draft.stages]
        each = list(zip(*sizes, strict=True))
        paced = sum(max(n * (p.compute + p.collective) for n, p in zip(own, found, strict=True)) for own in each)
        return paced + sum(n * p.microbatch for n, p in zip(each[0], found, strict=True))

    def offloading_seconds(self, plain: Draft, made: Draft) -> float:
        """Beside that, new parameters on their way over the accelerators to all hosts; compute hides the fetching."""
        assert made.plan is not None
        if "parameters" not in made.plan.stages[0].offload:
            return 0.0
        num_bytes = 2 * self._costs.width * self._surrogate.problem.model.layer_parameters
        kinds, fit = self._surrogate.problem.kinds, self._costs.network.fit
        rates = [
            min(host_gbytes_per_second(kinds[own.kind].accelerator, fit) for own in stage.seats)
            for stage in plain.stages
        ]
        return max(stage.layers * num_bytes * 1e-9 / rate for stage, rate in zip(plain.stages, rates, strict=True))

    def _pace(self, draft: Draft, index: int) -> _Pace:
        stage, compute, microbatch = draft.stages[index], 0.0, 0.0
        for own, samples in zip(stage.seats, self._surrogate.samples(draft, index), strict=True):
            layer = self._costs.rate(own.kind, own.tp, own.micro_batch, stage.recompute).layer.total
            compute, microbatch = max(compute, samples / own.micro_batch * layer), max(microbatch, layer)
        return _Pace(compute, microbatch, self._collective(stage.seats))

    def _collective(self, seats: tuple[Seats, ...]) -> float:
        """To sum a layer's gradients and gather its new weights, on the kinds' first ranks."""
        if seats not in self._collectives:
            problem, network = self._surrogate.problem, self._costs.network
            group = network.group([rank for own in seats for rank in problem.kinds[own.kind].ranks[: own.number]])
            num_bytes = problem.model.layer_parameters * sum(_widths(self._costs))
            self._collectives[seats] = network.reduce_scatter(group, num_bytes)
        return self._collectives[seats]


def _able(surrogate: Surrogate, draft: Draft) -> Iterator[int]:
    """Numbers of chunks with which the draft may fit, from the largest down: fewer are larger."""
    return takewhile(lambda chunks: _may_fit(surrogate, draft, chunks), range(_most_chunks(draft), 1, -1))


def _may_fit(surrogate: Surrogate, draft: Draft, chunks: int) -> bool:
    """Whether every rank has room, whatever is offloaded, for weights and gradients of the largest chunk and the
    gradients of a layer above; and, where what layers keep stays, for that beside the topmost chunk when a first
    microbatch is through."""
    problem = surrogate.problem
    weights, gradients = (width * problem.model.layer_parameters for width in _widths(surrogate.costs))
    for index, stage in enumerate(draft.stages):
        top, most = stage.layers // chunks, -(-stage.layers // chunks)
        keeps = not any("activations" in offload for offload in _offloads(problem, stage.recompute))
        for own, samples in zip(stage.seats, surrogate.samples(draft, index), strict=True):
            at = problem.coefficients(own.kind, 1, own.micro_batch, stage.recompute)
            microbatches = max(samples - DIVISION_ERR, 1) / own.micro_batch
            kept = keeps * at.layer_microbatch[MIDDLE] * (stage.layers * microbatches - top)
            room = problem.capacity(own.kind) - at.once[MIDDLE]
            if max(kept + top * (weights + gradients), most * (weights + gradients) + gradients) > room:
                return False
    return True


def _widths(costs: UnitCosts) -> tuple[int, int]:
    """Bytes of a weight and of a gradient."""
    return costs.width, costs.gradient_width


def _in_chunks(problem: Problem, costs: UnitCosts, draft: Draft, chunks: int, zero: int) -> Draft | None:
    """The draft in chunks with the least offloading that fits; None where none does."""
    workers = _workers(draft, problem, costs)
    if workers is None:
        return None
    layers = _chunks([stage.layers for stage in draft.stages], chunks)
    for offload in _offloads(problem, draft.stages[0].recompute):
        stages = [
            WholeStage(own, loads, zero, stage.recompute, offload)
            for stage, own, loads in zip(draft.stages, layers, workers, strict=True)
        ]
        name = f"zorse {draft.shape} {draft.stages[0].seats} in {chunks} {offload}"
        whole = draft_of(problem, name, "ministages", stages)
        assert whole.plan is not None
        if fits(problem, whole.plan):
            return whole
    return None


def _offloads(problem: Problem, recompute: Recompute) -> list[tuple[Offload, ...]]:
    """What may be offloaded, the least first."""
    able = set(problem.capabilities.offload)
    return [offload for offload in OFFLOADS[recompute] if set(offload) <= able]


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
    microbatches = accumulate((rate.microbatch(stage.layers, False, False).total for rate in rates), max)
    return division.Worker(micro_batch, tuple(microbatches))


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
