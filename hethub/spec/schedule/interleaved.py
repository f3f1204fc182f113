"""Interleaved 1F1B: stages of several chunks, every chunk a station of its own on a sample's way.

Where all replicas are alike and have a tile per stage the order is Megatron's (arXiv 2104.04473, §2.2). Anywhere else it
comes from a run on paper (hethub.spec.schedule.list_schedule).
"""

from collections.abc import Sequence
from itertools import accumulate

from hethub.spec.errors import BadInput
from hethub.spec.plan import PlanSpec
from hethub.spec.ranges import split
from hethub.spec.schedule.actions import Kind
from hethub.spec.schedule.list_schedule import PaperRun, depth
from hethub.spec.schedule.microbatches import Tiling, asked_in_flight, deal, load_alone
from hethub.spec.schedule.orders import LaneOrder, listed, updated_once


def interleave(plan: PlanSpec, tilings: Sequence[Tiling]) -> list[list[LaneOrder]]:
    """Per stage and lane, its passes in order. `tilings` are the stages' tiles, those of a lane under its number.

    `in_flight` counts passes held, of all chunks together. The default is Megatron's depth in proportion to the lane's
    samples, and more where the tiles would wait for each other otherwise. Raises BadInput where the plan gives less than
    that.
    """
    found = [[listed(own) for own in lanes] for lanes in PaperRun(plan, tilings).run()]
    for stage, lanes in enumerate(found):
        for lane, (asked, place) in enumerate(asked_in_flight(plan, stage)):
            if asked is not None and (held := most_held(lanes[lane])) > asked:
                raise BadInput(
                    f"{place}.in_flight is {asked}, but interleaved chunks of these tiles wait for {held} forwards of this replica; "
                    f"give at least {held}, or remove it."
                )
    return found


def interleave_regular(plan: PlanSpec) -> list[list[LaneOrder]]:
    """As `interleave` for a regular plan, without its tiles: the lanes of a stage share one list."""
    stages, num_tiles = len(plan.stages), load_alone(plan.stages[0].replicas[0]).num_tiles
    if num_tiles >= stages:
        orders = [_megatron(plan, stage, num_tiles) for stage in range(stages)]
    else:
        alone = plan.of_replicas([[0]] * stages)
        orders = [listed(own) for own, *_ in PaperRun(alone, [deal(stage.replicas) for stage in alone.stages]).run()]
    return [
        [order] * (1 if plan.runs_in_rounds(stage) else len(plan.stages[stage].replicas))
        for stage, order in enumerate(orders)
    ]


def most_held(order: LaneOrder) -> int:
    """The most passes that have run forward and not yet backward."""
    gains = [{Kind.FORWARD: 1, Kind.BACKWARD: -1}.get(kind, 0) for kind, _ in order.computing + order.updating]
    return max(accumulate(gains[way] for way in order.way_of))


def _megatron(plan: PlanSpec, stage: int, num_tiles: int) -> LaneOrder:
    """Groups of as many tiles as there are stages pass one chunk after the other; those left make the first ones larger.

    No group is smaller than the pipeline is long and the warm-up counts the largest, so with times m + stage for the
    m-th forward and k + 2 * stages - 2 - stage + (chunks - 1) * largest for the k-th backward everything comes after what
    it waits for.
    """
    stages, chunks = len(plan.stages), plan.num_chunks
    groups = split(num_tiles, num_tiles // stages)
    total = num_tiles * chunks
    warm = min(int(depth(stage, stages, 1, groups[0].size, chunks)), total)
    ways = [chunk for own in groups for chunk in range(chunks) for _ in range(own.size)]
    tiles = [index for own in groups for _ in range(chunks) for index in range(*own)]
    back = [2 * chunks - 1 - chunk for chunk in ways]
    computing = tuple((kind, chunk) for kind in (Kind.FORWARD, Kind.BACKWARD) for chunk in range(chunks))
    return updated_once(computing, _warmed(ways, back, warm), _warmed(tiles, tiles, warm))


def _warmed(forwards: list[int], backwards: list[int], warm: int) -> list[int]:
    """So many forwards, then one and a backward in turn, then the rest back."""
    steady = [one for pair in zip(forwards[warm:], backwards, strict=False) for one in pair]
    return forwards[:warm] + steady + backwards[len(forwards) - warm :]
