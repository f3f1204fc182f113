"""The parts of the plan space that the search does not enter, under keys that stay the same between versions.

Two that are left out are a waste, so they are not listed: selective recompute, which takes time and, where attention is
fused as in our runtime, leaves as much in memory as none; and uneven `tensor_shares` of ranks of one device type.
"""

from hethub.planner.result import Unsearched

_TP_OTHER = Unsearched("tp.other", "TP degrees that are no power of two")
_TP_MACHINES = Unsearched("tp.machines", "TP groups over several machines, or of unlike accelerators of one")
NOT_SEARCHED = (
    Unsearched("state_shares", "uneven state_shares, except as the cephalo family proposes them"),
    _TP_OTHER,
    _TP_MACHINES,
    Unsearched(
        "micro_batch.other",
        "micro-batches that are no power of two, except in small spaces, in stages of one device type and by local improvement",
    ),
    Unsearched(
        "combinations.many",
        "of very many device types, every TP degree of each with every one of all others, except by local improvement",
    ),
    Unsearched(
        "modes.mixed", "ZeRO levels, recompute and offload that differ between stages, except by local improvement"
    ),
    Unsearched(
        "chunks.other",
        "interleaved, numbers of chunks that do not cut every stage evenly, except 2, 4 and 8 where none does; under ministages, "
        "others than 4 and 16, except seven numbers from 2 to 16 in the zorse family's",
    ),
    Unsearched("schedules.stages", "layered over several stages, and interleaved on one, unless they are asked for"),
    Unsearched(
        "ranks.unused",
        "plans that leave accelerators unused, except the slowest device types (where nothing fits, the smallest), one maker or "
        "region or all but one, all but 1, 2, 4, … machines of one device type, and where nothing else fits all but some of the fastest",
    ),
    Unsearched(
        "stages.scattered",
        "stages whose accelerators are not consecutive where device types stand by speed or by memory, except on five units or "
        "fewer and by local improvement",
    ),
)

# The space of `exhaustive` has none of these, whatever the families propose beside it.
NOT_IN_A_SMALL_SPACE = (
    Unsearched("state_shares", "uneven state_shares"),
    _TP_OTHER,
    _TP_MACHINES,
    Unsearched(
        "micro_batch.other",
        "micro-batches that are no power of two and make no number of microbatches as equal as can be",
    ),
    Unsearched("schedules.other", "layered, interleaved and ministages; gpipe, unless it is asked for"),
    Unsearched("zero.2", "ZeRO 2"),
    Unsearched("offload", "state and activations in host memory"),
    Unsearched("ranks.unused", "plans that leave accelerators unused"),
)


def not_searched(strategy: str) -> tuple[Unsearched, ...]:
    """What a strategy's answer did not look at."""
    return NOT_IN_A_SMALL_SPACE if strategy == "exhaustive" else NOT_SEARCHED
