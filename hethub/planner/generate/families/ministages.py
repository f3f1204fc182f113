"""Zorse's ministages: every group of accelerators holds several chunks of layers, and all microbatches pass one before
the next.

With ZeRO-2 inside a group and, where memory asks for it, what layers keep, parameters or optimizer state in host
memory: what is resident is then a chunk or two, not the stage.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile
from operator import itemgetter
from typing import NamedTuple

from hethub.planner.candidate.candidate import Candidate, CandidateStage, Pattern, ReplicaGroup
from hethub.planner.candidate.materialize import materialize
from hethub.planner.candidate.samples import Worker
from hethub.planner.estimate.costs import UnitCosts
from hethub.planner.estimate.estimator import Estimator
from hethub.planner.estimate.memory_model import MIDDLE
from hethub.planner.estimate.memory_probes import Mode
from hethub.planner.generate.families import zorse
from hethub.planner.problem.problem import Problem
from hethub.predictor.cost.cache import memoized
from hethub.predictor.memory.ranks import all_fit, rank_memory
from hethub.spec.layout.bind import Layout
from hethub.spec.plan import Offload, Recompute
from hethub.spec.ranges import split

MOST_CANDIDATES = 3  # that fit
MOST_TRIED = 12  # in the order of rough estimates, for memory
# Times the limit: of 335 plans on seven clusters none was estimated to take more than 1.42 times its prediction.
FAR = 1.5
MOST_CHUNKS = 16  # of a stage: beyond, what is resident hardly falls
# What goes to host memory, one after the other.
LADDER: tuple[Offload, ...] = ("activations", "parameters", "optimizer")
DIVISION_ERR = 2  # samples of a replica more or fewer than estimated


def propose_whole(problem: Problem, costs: Estimator, *, limit_seconds: float = float("inf")) -> Iterator[Candidate]:
    """Zorse's candidates with their stages in chunks, those first that by a rough estimate take least; of those that
    fit, offloaded as far as memory asks for it; none that must take as long as the limit or is estimated far beyond
    it."""
    if "ministages" not in problem.schedules:
        return
    zero = max((z for z in problem.zeros if z <= 2), default=0)
    paces = _Paces(problem, costs)
    options = [
        (paces.seconds(candidate, chunks), candidate, chunks)
        for candidate in zorse.propose(problem, costs)
        if costs.least(candidate) < limit_seconds and costs.least_in_passes(candidate) < limit_seconds
        for chunks in _numbers_of_chunks(problem, costs, candidate)
    ]
    ranked = sorted(options, key=itemgetter(0))[:MOST_TRIED]
    # The best of every arrangement: estimates are no better than that.
    found: dict[object, tuple[float, Candidate]] = {}
    for seconds, candidate, chunks in takewhile(lambda option: option[0] < FAR * limit_seconds, ranked):
        if candidate.shape in found and found[candidate.shape][0] <= seconds:
            continue
        made = _in_chunks(problem, costs.unit_costs, candidate, chunks, zero)
        if made is not None:
            offered = (seconds + paces.offloading_seconds(candidate, made), made)
            found[candidate.shape] = min(found.get(candidate.shape, offered), offered, key=itemgetter(0))
    yield from (candidate for _, candidate in sorted(found.values(), key=itemgetter(0))[:MOST_CANDIDATES])


class _Pace(NamedTuple):
    """Seconds of a stage's layer: of all microbatches on the busiest replica, of one microbatch, and of its
    collectives."""

    compute: float
    microbatch: float
    collective: float


class _Paces:
    """Rough estimates of candidates in chunks, by what their stages' layers take."""

    def __init__(self, problem: Problem, costs: Estimator) -> None:
        self._problem, self._costs, self._unit_costs = problem, costs, costs.unit_costs

    def seconds(self, candidate: Candidate, chunks: int) -> float:
        """Chunk after chunk at the pace of the slowest stage, whose sums come behind its microbatches, and a
        microbatch through all."""
        found = [self._pace(candidate, index) for index in range(len(candidate.stages))]
        sizes = [[part.size for part in split(stage.layers, chunks)] for stage in candidate.stages]
        each = list(zip(*sizes, strict=True))
        paced = sum(max(n * (p.compute + p.collective) for n, p in zip(own, found, strict=True)) for own in each)
        return paced + sum(n * p.microbatch for n, p in zip(each[0], found, strict=True))

    def offloading_seconds(self, plain: Candidate, made: Candidate) -> float:
        """Beside that, new parameters on their way over the accelerators to all hosts; compute hides the fetching."""
        assert made.plan is not None
        if "parameters" not in made.plan.stages[0].offload:
            return 0.0
        num_bytes = 2 * self._unit_costs.width * self._problem.model.layer_parameters
        slowest = [max(self._costs.times.host_seconds[own.device_type] for own in s.groups) for s in plain.stages]
        return max(stage.layers * num_bytes * each for stage, each in zip(plain.stages, slowest, strict=True))

    def _pace(self, candidate: Candidate, index: int) -> _Pace:
        stage, compute, microbatch = candidate.stages[index], 0.0, 0.0
        for own, samples in zip(stage.groups, self._costs.samples(candidate, index), strict=True):
            layer = self._unit_costs.rate(own.device_type, own.tp, own.micro_batch, stage.recompute).layer.total
            compute, microbatch = max(compute, samples / own.micro_batch * layer), max(microbatch, layer)
        return _Pace(compute, microbatch, self._collective(stage.groups))

    @memoized
    def _collective(self, groups: tuple[ReplicaGroup, ...]) -> float:
        """To sum a layer's gradients and gather its new weights, on the device types' first ranks."""
        problem, network = self._problem, self._unit_costs.network
        group = network.group(
            [rank for own in groups for rank in problem.device_types[own.device_type].ranks[: own.number]]
        )
        return network.reduce_scatter(group, problem.model.layer_parameters * sum(_widths(self._unit_costs)))


def _numbers_of_chunks(problem: Problem, costs: Estimator, candidate: Candidate) -> Iterator[int]:
    """Numbers of chunks with which the candidate may fit, from the largest down: fewer are larger."""
    most = min(MOST_CHUNKS, *(stage.layers for stage in candidate.stages))
    return takewhile(lambda chunks: _may_fit(problem, costs, candidate, chunks), range(most, 1, -1))


def _may_fit(problem: Problem, costs: Estimator, candidate: Candidate, chunks: int) -> bool:
    """Whether every rank has room, whatever is offloaded, for weights and gradients of the largest chunk and the
    gradients of a layer above; and, where what layers keep stays, for that beside the topmost chunk when a first
    microbatch is through."""
    weights, gradients = (width * problem.model.layer_parameters for width in _widths(costs.unit_costs))
    for index, stage in enumerate(candidate.stages):
        mode = Mode(stage.recompute, problem.usual_zero)
        top, most = stage.layers // chunks, -(-stage.layers // chunks)
        keeps = not any("activations" in offload for offload in _offloads(stage.recompute))
        for own, samples in zip(stage.groups, costs.samples(candidate, index), strict=True):
            at = costs.unit_costs.coefficients(own.device_type, 1, own.micro_batch, mode)
            microbatches = max(samples - DIVISION_ERR, 1) / own.micro_batch
            kept = keeps * at.layer_microbatch[MIDDLE] * (stage.layers * microbatches - top)
            room = problem.capacity(own.device_type) - at.once[MIDDLE]
            if max(kept + top * (weights + gradients), most * (weights + gradients) + gradients) > room:
                return False
    return True


def _widths(unit_costs: UnitCosts) -> tuple[int, int]:
    """Bytes of a weight and of a gradient."""
    return unit_costs.width, unit_costs.gradient_width


def _in_chunks(
    problem: Problem, unit_costs: UnitCosts, candidate: Candidate, chunks: int, zero: int
) -> Candidate | None:
    """The candidate in chunks with the least offloading that fits; None where none does."""

    def worker(stage: CandidateStage, group: ReplicaGroup, first: bool, last: bool) -> Worker:
        return unit_costs.worker(stage, group, False, False)  # a chunk between the ends

    for offload in _offloads(candidate.stages[0].recompute):
        stages = tuple([replace(stage, zero=zero, offload=offload) for stage in candidate.stages])
        cut = replace(candidate, stages=stages, pattern=Pattern("ministages", chunks))
        plan = materialize(cut, problem, worker, None)
        if plan is None:
            return None
        layout = Layout(plan, problem.model, problem.cluster)
        if all_fit(layout, rank_memory(layout), problem.constraints.reserve):
            name = f"zorse {candidate.shape} {candidate.stages[0].groups} in {chunks} {offload}"
            return Candidate(tuple([replace(stage, offload=()) for stage in stages]), name=name, plan=plan)
    return None


def _offloads(recompute: Recompute) -> list[tuple[Offload, ...]]:
    """What may be offloaded, the least first. Of activations layers' inputs alone are few enough for the way to the
    host."""
    ladder = LADDER if recompute == "full" else LADDER[1:]
    return [ladder[:count] for count in range(len(ladder) + 1)]
