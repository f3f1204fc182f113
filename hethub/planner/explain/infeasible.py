"""No plan fits: by how much on what, and the smallest changes with which one does, each verified by planning with
it."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from hethub.planner.evaluate.incumbent import Incumbent
from hethub.planner.generate import modes
from hethub.planner.generate.cuts import best_cuts
from hethub.planner.generate.table import tabulate
from hethub.planner.problem.problem import Problem
from hethub.planner.search.auto import thriftiest
from hethub.planner.search.left_out import Part, parts
from hethub.predictor.memory.ranks import overfull_hosts
from hethub.spec.job import ConstraintsSpec
from hethub.spec.plan import SCHEDULES

TRIED = 12  # cuts of a changed question that are evaluated


class Change(NamedTuple):
    """A change of the question in words, and the question it leads to."""

    words: str
    problem: Problem


def nothing_fits(incumbent: Incumbent, strategy: str) -> str:
    """One paragraph: the plan that came closest, by how many bytes it misses on which accelerators, and what would
    help."""
    problem, closest = incumbent.problem, incumbent.closest
    if incumbent.out_of_time:
        return (
            f"constraints.time_limit_seconds {problem.constraints.time_limit_seconds:g} ended the search before a plan that fits "
            "was found; allow more time."
        )
    if closest is None:
        given = problem.constraints.model_dump(mode="json", exclude_defaults=True)
        under, relax = (
            (f"under constraints {given}", "relax the constraints, ") if given else ("without any constraint", "")
        )
        return (
            f"strategy '{strategy}' has no plan for cluster '{problem.cluster.name}' ({problem.size} accelerators) and global_batch "
            f"{problem.batch.global_batch} {under}: {_needs(problem)}. Raise global_batch, "
            f"{relax}use fewer accelerators or choose another strategy."
        )
    reserve = problem.constraints.reserve
    devices = _listed((entry.accelerator, entry.bytes - int(entry.limit * (1 - reserve))) for entry in closest.memory)
    overfull = overfull_hosts(problem.cluster, closest.memory)
    hosts = _listed((f"x node '{node.name}'", held - node.host_memory_bytes) for node, held in overfull)
    exceeded = [f"the memory (of which {100 * reserve:g} % stay free) of {devices}"] if devices else []
    if hosts:
        assumed = any(node.host_memory_gb is None for node, _ in overfull)
        exceeded += [
            f"the hosts' memory, which holds what is offloaded and a checkpoint's copy, of {hosts}; where the machines have more"
            f"{' than their accelerators, as is assumed' if assumed else ''}, raise host_memory_gb of their nodes"
        ]
    helps = [change.words for change in verified(problem)]
    return (
        f"no plan fits: model '{problem.model.name}' with global_batch {problem.batch.global_batch} and seq_len {problem.batch.seq_len} on "
        f"cluster '{problem.cluster.name}'. The plan that comes closest exceeds {', and '.join(exceeded)}. "
        + (
            f"A plan fits with {'; or with '.join(helps)}."
            if helps
            else "No single change tried makes one fit: take a smaller model."
        )
    )


def _listed(missing: Iterable[tuple[str, int]]) -> str:
    """Return for each name how many accelerators miss bytes, and how many bytes one of them misses at most. Names of which none
    misses any are left out."""
    by_name = defaultdict[str, list[int]](list)
    for name, missed in missing:
        if missed > 0:
            by_name[name].append(missed)
    return "; ".join(
        f"{len(own)} {name} by up to {max(own):,} bytes ({max(own) / 2**30:.2f} GiB)" for name, own in by_name.items()
    )


def _needs(problem: Problem) -> str:
    """What every plan of such a question has."""
    given, makers = problem.constraints, {each.island for each in problem.device_types}
    needs = "every accelerator needs a layer and a sample"
    if given.schedule and SCHEDULES[given.schedule].takes_chunks:
        needs = "every stage needs two layers or more, a chunk each, and every accelerator a sample"
    if given.zero == 0 and len(makers) > 1:
        needs += ", and with zero: 0 all replicas of a stage lie on one maker's island (with zero: 1 they need not)"
    if given.forbid:
        needs += f", and no stage holds {' or '.join(' and '.join(pair) for pair in given.forbid)} together"
    return needs


def verified(problem: Problem) -> list[Change]:
    """The smallest change of each sort with which a plan was found."""
    sorts = (
        _free_constraints,
        _less_reserve,
        fewer_samples,
        _shorter,
        _more_host_memory,
        _more_nodes,
    )  # steps of each, the smallest first
    found = (next(filter(_fits, sort(problem)), None) for sort in sorts)
    return [change for change in found if change is not None]


def _fits(change: Change) -> bool:
    """Whether a plan is found among the thriftiest cuts, in any mode, also of the parts of the accelerators that a search
    looks at."""
    problem, incumbent = change.problem, Incumbent(change.problem)
    costs = incumbent.costs
    for part in chain([Part(problem, list(problem.usable), float("inf"))], parts(incumbent)):
        few = thriftiest(part.problem, tabulate(part.problem, costs.unit_costs, part.device_types))
        found = modes.propose(part.problem, costs, best_cuts(part.problem, few, TRIED))
        for candidate in sorted(found, key=costs.seconds)[:TRIED]:
            incumbent.consider(candidate)
            if incumbent.fitting:
                return True
    return False


def _free_constraints(problem: Problem) -> Iterator[Change]:
    free = ConstraintsSpec()
    for key in ("recompute", "zero", "micro_batch", "schedule", "forbid", "tp", "pp", "dp"):
        if getattr(problem.constraints, key) != getattr(free, key):
            relaxed = problem.with_constraints(problem.constraints.replace(**{key: getattr(free, key)}))
            yield Change(f"constraints.{key} left free", relaxed)


def _less_reserve(problem: Problem) -> Iterator[Change]:
    """The default's, then hardly any."""
    for reserve in (ConstraintsSpec().reserve, 0.02):
        if reserve < problem.constraints.reserve:
            relaxed = problem.with_constraints(problem.constraints.replace(reserve=reserve))
            yield Change(f"constraints.reserve: {reserve:g}", relaxed)


def fewer_samples(problem: Problem) -> Iterator[Change]:
    """A half, a quarter, … of the batch: fewer microbatches can be in flight."""
    batch = problem.batch
    for part in (2, 4, 8) if not problem.constraints.keep_global_batch else ():
        if samples := batch.global_batch // part:
            yield Change(f"global_batch {samples}", replace(problem, batch=batch._replace(global_batch=samples)))


def _shorter(problem: Problem) -> Iterator[Change]:
    """Sequences of three quarters, a half, … of the length."""
    batch = problem.batch
    for eighths in (6, 4, 3, 2, 1):
        if seq_len := batch.seq_len * eighths // 8:
            yield Change(f"seq_len {seq_len}", replace(problem, batch=batch._replace(seq_len=seq_len)))


def _more_host_memory(problem: Problem) -> Iterator[Change]:
    """Twice, four times, … the host memory of all machines, where 64 times as much would do."""
    machines, places = problem.cluster.machines, problem.cluster.places
    has = {place.node.name: machines[place.machine].host_memory_bytes / 2**30 for place in places}

    def larger(times: int) -> Change:
        nodes = [node.unchecked(host_memory_gb=times * has[node.name]) for node in problem.cluster.nodes]
        words = ", ".join(f"{node.host_memory_gb:g} of node '{node.name}'" for node in nodes)
        return Change(f"host_memory_gb {words}", problem.on(problem.cluster.unchecked(nodes=tuple(nodes))))

    if _fits(larger(64)):
        yield from map(larger, (2, 4, 8, 16, 32, 64))


def _more_nodes(problem: Problem) -> Iterator[Change]:
    """More nodes of the device type with the most memory: an eighth more, a quarter, … up to four times as many."""
    nodes = problem.cluster.nodes
    whole = [index for index, node in enumerate(nodes) if node.part_of is None]  # there is one of a machine in parts
    index = max(whole, key=lambda i: nodes[i].device.memory_bytes * nodes[i].accelerators, default=None)
    if index is None or (nodes[index].gbps is None and not problem.cluster.emulated):
        return  # a machine alone: what would join two of them is not known
    count = nodes[index].count
    wanted = dict.fromkeys(max(1, round(count * part)) for part in (0.125, 0.25, 0.5, 1, 2, 3))
    for more in wanted:
        grown = nodes[index].unchecked(count=count + more)  # of whichever hosts
        cluster = problem.cluster.unchecked(nodes=(*nodes[:index], grown, *nodes[index + 1 :]))
        if cluster.size <= problem.batch.global_batch * problem.model.layers:
            yield Change(
                f"{more} more of node '{grown.name}' ({grown.accelerators} {grown.device.name} each)",
                problem.on(cluster),
            )
