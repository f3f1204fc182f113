"""HETHUB's reference, which its paper calls the upper bound: the sum over device types of the throughput that each reaches
alone in its best plan."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from hethub.planner.estimate.costs import UnitCosts
from hethub.planner.evaluate.incumbent import Incumbent
from hethub.planner.evaluate.processes import forked
from hethub.planner.problem.problem import Problem
from hethub.planner.result import HomogeneousPart
from hethub.planner.search.auto import search
from hethub.planner.search.effort import effort_for

SIGNIFICANT_BITS = 6  # of a device type's part of the batch
ANY_MEMORY_GB = 1e6  # of an accelerator, and of a host

Alone = tuple[HomogeneousPart, ...] | None  # every device type's part; None where the bound is undefined


def homogeneous_parts(problem: Problem, processes: int = 1) -> Alone:
    """The parts of the homogeneous sum of a question, whatever its plan; None where it is undefined."""
    with homogeneous_parts_beside(problem, processes) as found:
        return found()


@contextmanager
def homogeneous_parts_beside(problem: Problem, processes: int) -> Iterator[Callable[[], Alone]]:
    """What gives every device type alone with its part of the batch; None where the bound is undefined, a device type's part being no
    sample. With several processes the device types are planned beside what the caller does before it asks."""
    # Under no time limit: a search that is cut short would understate the sum.
    parts = _parts(problem.with_constraints(problem.constraints.replace(time_limit_seconds=None)))
    if parts is None:
        yield lambda: None
        return
    # As many as there are processors: beside the caller, who takes longest, they are the nice ones.
    with forked(_alone, parts, processes if processes > 1 else 0) as results:
        yield lambda: None if None in (found := results()) else tuple(filter(None, found))


def makers_alone_tokens_per_second(alone: Alone) -> float | None:
    """The sum of the device types' throughputs."""
    return sum(part.tokens_per_second for part in alone) if alone else None


def _parts(problem: Problem) -> list[Problem] | None:
    """The problem on every device type alone, with its part of the batch, in the file's order; None where one's is no sample,
    or its machines are too small for the degree given."""
    costs = UnitCosts(problem)
    weights = [device_type.size * costs.layer_rate(index) for index, device_type in enumerate(problem.device_types)]
    found = []
    for index in sorted(range(len(weights)), key=lambda index: problem.device_types[index].ranks[0]):
        samples = divisible(problem.batch.global_batch * weights[index] / sum(weights))
        alone = problem.of_device_type(index)
        if not samples or not alone.usable:
            return None
        found.append(replace(alone, batch=problem.batch._replace(global_batch=samples)))
    return found


def divisible(samples: float) -> int:
    """About as many samples, to 1.6 %, as replicas can divide. Who trains on one device type takes such a batch: with an odd
    part each type alone reaches up to 5 % less, and the whole cluster would look so much the better beside them."""
    step = 1 << max(0, int(samples).bit_length() - SIGNIFICANT_BITS)
    return step * round(samples / step)


def _with_any_memory(problem: Problem) -> Problem:
    """The question where accelerators and hosts have room for whatever a plan needs."""
    nodes = [
        node.unchecked(accelerator=node.device.unchecked(memory_gb=ANY_MEMORY_GB), host_memory_gb=ANY_MEMORY_GB)
        for node in problem.cluster.nodes
    ]
    return problem.on(problem.cluster.unchecked(nodes=tuple(nodes)))


def _alone(problem: Problem) -> HomogeneousPart | None:
    """The best plan of one device type, as `auto` finds it; where nothing fits, its best plan without a memory limit, marked
    so."""
    device_type = problem.device_types[0]
    for lifted in (False, True):
        best = search(Incumbent(_with_any_memory(problem) if lifted else problem), effort_for(problem))
        if best is not None:
            return HomogeneousPart(
                accelerator=device_type.accelerator.name,
                island=device_type.island,
                count=problem.size,
                global_batch=problem.batch.global_batch,
                tokens_per_second=best.prediction.tokens_per_second,
                memory_lifted=lifted,
                cluster=problem.cluster,
                plan=best.plan,
            )
    return None
