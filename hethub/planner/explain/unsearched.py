"""The parts of the plan space that the search does not enter, under keys that stay the same between versions."""

from collections.abc import Iterator
from typing import get_args

from hethub.planner.problem.capabilities import Capabilities
from hethub.planner.problem.problem import Problem
from hethub.planner.result import Unsearched
from hethub.spec.plan import Offload, ScheduleName

_OF_FAMILIES = "only as the families of their papers propose it"
_ALWAYS = (
    Unsearched("tensor_shares", "uneven tensor_shares inside a replica"),
    Unsearched("state_shares", "uneven state_shares, except as the cephalo family proposes them"),
    Unsearched("tp.other", "TP degrees that are no power of two"),
    Unsearched(
        "micro_batch.other",
        "micro-batches that are no power of two, except in small spaces, in stages of one kind and by local improvement",
    ),
    Unsearched(
        "combinations.many",
        "of very many kinds, every TP degree of each with every one of all others, except by local improvement",
    ),
    Unsearched("ranks.unused", "plans that leave accelerators unused"),
    Unsearched(
        "stages.scattered",
        "stages whose accelerators are not consecutive in an order of kinds, except on five units or fewer and by local "
        "improvement",
    ),
)


def not_searched(problem: Problem) -> tuple[Unsearched, ...]:
    """Every part of the plan space that this search does not enter, one entry each."""
    return (*_beyond(problem.capabilities), *_ALWAYS)


def _beyond(capable: Capabilities) -> Iterator[Unsearched]:
    """What the plan format knows and the table of capabilities does not allow, or to the families alone."""
    for name in get_args(ScheduleName):
        if name not in capable.schedules:
            how = _OF_FAMILIES if name in capable.family_schedules else "not searched"
            yield Unsearched(f"schedule.{name}", f"schedule {name}: {how}")
    for level in range(4):
        if level not in capable.zero:
            how = _OF_FAMILIES if level in capable.family_zero else "not searched"
            yield Unsearched(f"zero.{level}", f"ZeRO {level}: {how}")
    if capable.max_chunks == 1:
        yield Unsearched("chunks", f"several chunks of layers per stage: {_OF_FAMILIES}")
    for kind in get_args(Offload):
        how = f"{_OF_FAMILIES}, and where nothing fits without" if kind in capable.offload else "not searched"
        yield Unsearched(f"offload.{kind}", f"offload of {kind}: {how}")
