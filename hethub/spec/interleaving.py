"""Interleaved 1F1B: stages of several chunks, every chunk a station of its own on a sample's way.

Where all replicas are alike the order is Megatron's (arXiv 2104.04473, §2.2). Anywhere else it comes from a run on
paper (hethub.spec.paper_run).
"""

from collections.abc import Sequence

from hethub.spec.action import Kind, Pass
from hethub.spec.errors import BadInput
from hethub.spec.paper_run import PaperRun, depth
from hethub.spec.plan import PlanSpec
from hethub.spec.tiling import Tile, asked_in_flight, is_regular


def interleave(plan: PlanSpec, tiles: Sequence[Sequence[Tile]]) -> list[list[list[Pass]]]:
    """Per stage and lane, its passes in order. `tiles` are the stages' tiles, those of a lane under its number.

    `in_flight` counts passes held, of all chunks together. The default is Megatron's depth in proportion to the lane's
    samples, and more where the tiles would wait for each other otherwise. Raises BadInput where the plan gives less than
    that.
    """
    if is_regular(plan) and len(tiles[0]) // _num_lanes(tiles[0]) % len(tiles) == 0:
        return [_megatron(plan, stage, own) for stage, own in enumerate(tiles)]
    found = PaperRun(plan, tiles).run()
    for stage, lanes in enumerate(found):
        for lane, (asked, place) in enumerate(asked_in_flight(plan, stage)):
            if asked is not None and (held := most_held(lanes[lane])) > asked:
                raise BadInput(
                    f"{place}.in_flight is {asked}, but interleaved chunks of these tiles wait for {held} forwards of this replica; "
                    f"give at least {held}, or remove it."
                )
    return found


def most_held(passes: Sequence[Pass]) -> int:
    """The most passes that have run forward and not yet backward."""
    held = most = 0
    for one in passes:
        held += {Kind.FORWARD: 1, Kind.BACKWARD: -1}.get(one.kind, 0)
        most = max(most, held)
    return most


def _num_lanes(tiles: Sequence[Tile]) -> int:
    return len({tile.replica for tile in tiles})


def _megatron(plan: PlanSpec, stage: int, tiles: Sequence[Tile]) -> list[list[Pass]]:
    """Groups of as many tiles as there are stages pass one chunk after the other, the same list for every lane."""
    stages, chunks = len(plan.stages), plan.num_chunks
    num_lanes = _num_lanes(tiles)
    total = len(tiles) // num_lanes * chunks
    warm = min(int(depth(stage, stages, 1, stages, chunks)), total)
    chunk = [k % (stages * chunks) // stages for k in range(total)]
    index = [k // (stages * chunks) * stages + k % stages for k in range(total)]
    forwards = [Pass(Kind.FORWARD, chunk[k], index[k]) for k in range(total)]
    backwards = [Pass(Kind.BACKWARD, chunks - 1 - chunk[k], index[k]) for k in range(total)]
    order = forwards[:warm]
    for k in range(total - warm):
        order += (forwards[warm + k], backwards[k])
    return [order + backwards[total - warm :]] * num_lanes
