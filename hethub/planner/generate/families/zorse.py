"""`zorse`: Zorse's plans (arXiv 2507.10392). Groups of machines by a minimum k-cut of the bandwidth graph, a stage per
group, layers in proportion to its speed, no TP, unlike accelerators of a stage with samples in proportion to speed.

Its ministages: every group holds several chunks of layers, and all microbatches pass one before the next, with ZeRO-2
inside a group and, where memory asks for it, what layers keep, parameters or optimizer state in host memory: what is
resident is then a chunk or two, not the stage.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import islice

import numpy as np

from hethub.planner.candidate.candidate import Candidate, CandidateStage, Pattern, ReplicaGroup
from hethub.planner.candidate.materialize import materialize
from hethub.planner.estimate.costs import UnitCosts
from hethub.planner.estimate.estimator import Estimator
from hethub.planner.generate.families.uniform import Sort, groups_of, units_in_order
from hethub.planner.problem.problem import Problem, Unit
from hethub.predictor.memory.ranks import all_fit, rank_memory
from hethub.spec.layout.bind import Layout
from hethub.spec.plan import Offload, Recompute
from hethub.spec.ranges import split_by_shares

MOST_NODES = 48  # of the graph: with more machines, neighbours of one device type are one node
MOST_TRIED = 24  # in chunks
CHUNKS = (2, 3, 4, 6, 8, 12, 16)  # of a stage: beyond, what is resident hardly falls
LADDER: tuple[Offload, ...] = ("activations", "parameters", "optimizer")  # to host memory, one after the other


def propose(problem: Problem, costs: Estimator) -> Iterator[Candidate]:
    """A candidate per number of groups of machines, micro-batch and recompute."""
    if problem.constraints.tp not in (None, 1):
        return
    nodes = _nodes(problem)
    weights = _bandwidths(problem, costs.unit_costs, nodes)
    cut = cache(lambda part: _minimum_cut(weights[np.ix_(part, part)]))
    count = cache(partial(_count, nodes))
    parts: list[Part] = [tuple(range(len(nodes)))]
    for number in range(1, min(len(nodes), problem.model.layers) + 1):
        parts = _split_once(parts, cut) if number > 1 else parts
        sorts = _by_memory(problem, list(map(count, parts)))
        if problem.allows([sum(units for _, units in own) for own in sorts]):
            for micro_batch in problem.micro_batches:
                groups = {own: groups_of(problem, own, micro_batch) for own in set(sorts)}
                for recompute in problem.recomputes:
                    yield _candidate(problem, costs.unit_costs, [groups[own] for own in sorts], recompute)


def propose_in_chunks(problem: Problem, costs: Estimator) -> Iterator[Candidate]:
    """These candidates as ministages: of every arrangement the number of chunks, and what of it goes to host memory, that
    are estimated to take least where it fits."""
    if "ministages" not in problem.schedules:
        return
    zero = max((z for z in problem.zeros if z <= 2), default=0)
    chunked = [
        _in_chunks(own, chunks, zero, count)
        for own in propose(problem, costs)
        for chunks in CHUNKS
        if chunks <= min(stage.layers for stage in own.stages)
        for count in range(len(LADDER) + 1)
    ]
    shapes = set()
    for own in islice(sorted(costs.below(chunked, float("inf")), key=costs.seconds), MOST_TRIED):
        if own.shape not in shapes and _fits(problem, costs, own):
            shapes.add(own.shape)
            yield own


def _in_chunks(candidate: Candidate, chunks: int, zero: int, count: int) -> Candidate:
    """With so much in host memory. Of activations layers' inputs alone are few enough for the way there."""
    ladder = LADDER if candidate.stages[0].recompute == "full" else LADDER[1:]
    stages = tuple([replace(stage, zero=zero, offload=ladder[:count]) for stage in candidate.stages])
    return replace(candidate, stages=stages, pattern=Pattern("ministages", chunks))


def _fits(problem: Problem, costs: Estimator, candidate: Candidate) -> bool:
    """Whether it does by the predictor's memory."""
    plan = materialize(candidate, problem, costs.unit_costs.worker, None)
    if plan is None:
        return False
    layout = Layout(plan, problem.model, problem.cluster)
    return all_fit(layout, rank_memory(layout), problem.constraints.reserve)


Part = tuple[int, ...]  # a group of the graph's nodes
Cut = tuple[float, list[int]]  # its weight and one side


def _count(nodes: list[list[Unit]], part: Part) -> Sort:
    return tuple(Counter((unit.device_type, unit.tp) for node in sorted(part) for unit in nodes[node]).items())


def _by_memory(problem: Problem, parts: list[Sort]) -> list[Sort]:
    """Groups from the most memory per accelerator to the least: the first stages hold the most microbatches."""
    memory = {
        part: sum(problem.device_types[device_type].memory_bytes * n for (device_type, _), n in part)
        / sum(n for _, n in part)
        for part in set(parts)
    }
    return sorted(parts, key=memory.__getitem__, reverse=True)


def _nodes(problem: Problem) -> list[list[Unit]]:
    """Machines as lists of single-rank units; few of one device type together where there are many machines."""
    machines: dict[int, list[Unit]] = {}
    for unit in units_in_order(problem, 1):
        machines.setdefault(problem.cluster.places[unit.ranks[0]].machine, []).append(unit)
    number = -(-len(machines) // MOST_NODES)
    nodes: list[list[Unit]] = []
    for units in machines.values():
        if nodes and nodes[-1][0].device_type == units[0].device_type and len(nodes[-1]) < number * len(units):
            nodes[-1] = nodes[-1] + units
        else:
            nodes.append(units)
    return nodes


def _bandwidths(problem: Problem, unit_costs: UnitCosts, nodes: list[list[Unit]]) -> np.ndarray:
    """Bytes per second between nodes of the graph, as all pairs reach them together: what a cut weighs is then what
    its wires carry, so that groups are parted where the network is slow. By pairs one at a time, every cut would part
    a node from all others, and never a region from a region."""
    weights = np.zeros((len(nodes), len(nodes)))
    firsts = [node[0].ranks[0] for node in nodes]
    places = [problem.cluster.places[rank] for rank in firsts]
    regions = problem.cluster.links.regions
    here = [regions.of_node[place.node.name] if regions else "" for place in places]
    known: dict[tuple[int, int], float] = {}
    for a in range(len(nodes)):
        for b in range(a):
            key = (nodes[a][0].device_type, nodes[b][0].device_type)
            if key not in known:
                known[key] = (
                    1.0 / unit_costs.network.link(firsts[a], firsts[b], sharing=len(nodes) - 1).seconds_per_byte
                )
                if regions and here[a] != here[b]:
                    wire = regions.gbps[regions.names.index(here[a])][regions.names.index(here[b])] / 8 * 1e9
                    known[key] = min(known[key], wire / (here.count(here[a]) * here.count(here[b])))
            weights[a, b] = weights[b, a] = known[key]
    return weights


def _split_once(parts: list[Part], cut: Callable[[Part], Cut]) -> list[Part]:
    """The groups with one of them split by the lightest of all their minimum cuts (the greedy SPLIT)."""
    cuts = [(*cut(part), index) for index, part in enumerate(parts) if len(part) > 1]
    _, side, index = min(cuts, key=lambda cut: (cut[0], cut[2]))
    chosen = tuple([parts[index][i] for i in side])
    rest = tuple([node for node in parts[index] if node not in set(chosen)])
    return sorted([*parts[:index], chosen, rest, *parts[index + 1 :]], key=min)


def _minimum_cut(weights: np.ndarray) -> Cut:
    """Weight and one side of a global minimum cut (Stoer and Wagner 1997)."""
    first = weights[0, 1]
    if (weights == first).sum() == weights.size - len(weights):  # all alike: any node apart, here the last one
        return sum([first] * (len(weights) - 1)), [len(weights) - 1]
    weights = weights.copy()
    merged = [[i] for i in range(len(weights))]
    alive = list(range(len(weights)))
    best: Cut = (float("inf"), [])
    while len(alive) > 1:
        attached = np.full(len(weights), -np.inf)  # of those not yet in order
        attached[alive[1:]] = weights[alive[0], alive[1:]]
        order, last = [alive[0]], 0.0
        for _ in alive[1:]:
            chosen = int(attached.argmax())
            order.append(chosen)
            last = float(attached[chosen])
            attached += weights[chosen]
            attached[chosen] = -np.inf
        end, before = order[-1], order[-2]
        if last < best[0]:
            best = (last, list(merged[end]))
        weights[before] += weights[end]
        weights[:, before] += weights[:, end]
        weights[before, before] = 0.0
        merged[before] += merged[end]
        alive.remove(end)
    return best


def _candidate(
    problem: Problem, unit_costs: UnitCosts, stages: Sequence[tuple[ReplicaGroup, ...]], recompute: Recompute
) -> Candidate:
    """Layers in proportion to the groups' speed, rounded, at least one each."""
    speeds = [_speed(unit_costs, groups, recompute) for groups in stages]
    whole, spare = sum(speeds), problem.model.layers - len(stages)
    shares = [max(speed / whole * problem.model.layers - 1.0, 0.0) for speed in speeds]
    extra = [part.size for part in split_by_shares(spare, shares)] if sum(shares) > 0 else [0] * len(stages)
    formed = [
        CandidateStage(1 + more, groups, recompute, problem.usual_zero)
        for more, groups in zip(extra, stages, strict=True)
    ]
    return Candidate(tuple(formed), pattern=Pattern(problem.schedule))


def _speed(unit_costs: UnitCosts, groups: tuple[ReplicaGroup, ...], recompute: Recompute) -> float:
    """Samples per second on a layer."""
    layer = [unit_costs.rate(own.device_type, own.tp, own.micro_batch, recompute).layer.total for own in groups]
    return sum(own.number * own.micro_batch / s for own, s in zip(groups, layer, strict=True))
