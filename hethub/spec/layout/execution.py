"""Schedules: pure functions from a layout to every replica's ordered actions, and a proof that they can finish.

One schedule, two interpreters: the predictor's simulator replays it against costs, the runtime's executor runs it.
What both may rely on:

- `schedule(layout)` is the one source of order: a rank runs its replica's list from front to back.
- `dependencies(layout, action)` are the actions of other stages that must have ended before an action can start. What
  crosses between stages is no action of its own: a forward first waits for the transfers that end in its tile and part
  and then sends those that start there (Layout.boundaries); a backward does the same the other way. Between
  neighbouring parts of one stage a replica hands its own tile over; its list has the two in the right order.
- A stage that runs in rounds (`plan.runs_in_rounds`) gives all its replicas lists of one length. Their k-th entries are
  one round: the same kind and part, with a tile or without. A round's collectives need all of its replicas, so none
  gets further into the next round than they allow; the proof takes a round as one action.
- Reduction, step and gather come once at the end of a list, or under ministages behind the last backward of each part.
  Where gradients are clipped a part's step is put off until the norm is known and the part is next at hand; the list
  says where it belongs.
- Every compute action of a tile in a part comes once: forward, backward, and under zero_bubble weight after it.
"""

from collections.abc import Iterable

from hethub.spec.layout.bind import Layout
from hethub.spec.layout.state import StateMap
from hethub.spec.schedule.actions import COMPUTE, Action, Kind
from hethub.spec.schedule.microbatches import overlapping
from hethub.spec.schedule.orders import NO_TILE, LaneOrder, part_by_part, pipelined

__all__ = ["COMPUTE", "Action", "Kind", "actions", "check_executable", "dependencies",
           "execution_order", "lane_order", "put_off", "schedule"]  # fmt: skip


def check_executable(layout: Layout) -> None:
    """Raises BadInput naming what the plan asks for and the runtime cannot do: state shares that nobody can hold."""
    _ = StateMap(layout).buckets


def actions(layout: Layout, stage: int, replica: int) -> list[Action]:
    """The ordered actions of every rank of a replica for one step."""
    own, num_parts = layout.lane_tiles(stage, replica), len(layout.parts(stage))
    parts_of_updates = num_parts if layout.plan.steps_part_by_part else 1
    return [
        Action(kind, stage, None, part, parts_of_updates)
        if index == NO_TILE
        else Action(kind, stage, own[index], part, num_parts)
        for kind, part, index in lane_order(layout, stage, layout.lane_of(stage, replica)).passes
    ]


def lane_order(layout: Layout, stage: int, lane: int) -> LaneOrder:
    """What a lane does with its tiles, in order, and its updates."""
    name = layout.plan.schedule
    if name == "interleaved":
        return layout.interleaved[stage][lane]
    num_tiles = layout.loads[stage][lane].num_tiles
    if layout.plan.goes_part_by_part:
        return part_by_part(num_tiles, len(layout.parts(stage)), layout.plan.steps_part_by_part)
    later = put_off(layout, stage, lane) if name == "zero_bubble" else None
    return pipelined(num_tiles, layout.lane_limits[stage][lane], later)


def put_off(layout: Layout, stage: int, lane: int) -> int:
    """Tiles whose weight part zero_bubble puts off: those that keep a stage's samples under way at the fullest stage's.

    Later stages hold fewer tiles, so they have that much room, and their backwards come the sooner to those before
    (arXiv 2401.10241, its schedule H1). A replica takes its share of the stage's samples.
    """
    under_way = layout.samples_under_way
    own = layout.loads[stage][lane]
    return (max(under_way) - under_way[stage]) * own.samples // (layout.plan.global_batch * own.largest)


def schedule(layout: Layout) -> dict[tuple[int, int], list[Action]]:
    """The actions of every replica, by (stage, replica)."""
    return {(s, r): actions(layout, s, r) for s, stage in enumerate(layout.stages) for r in range(len(stage.replicas))}


def dependencies(layout: Layout, action: Action) -> list[Action]:
    """The actions on other stages that must have ended before this one can start; none where it has no tile."""
    if action.tile is None or action.kind not in (Kind.FORWARD, Kind.BACKWARD):
        return []
    unit = layout.unit_beside(action.stage, action.part, -1 if action.kind is Kind.FORWARD else 1)
    if unit is None or unit.stage == action.stage:
        return []
    num_parts = len(layout.parts(unit.stage))
    others = overlapping(layout.tiles[unit.stage], action.tile.samples)
    return [Action(action.kind, unit.stage, other, unit.part, num_parts) for other in others]


def execution_order(layout: Layout) -> list[tuple[int, int, Action]]:
    """A global order in which all compute actions can run, as (stage, replica, action): the proof of no deadlock.

    The entries of a round run together, once all of them can. Raises AssertionError naming the actions that wait for
    each other if there is no such order.
    """
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for s, r in (lists := schedule(layout)):
        lanes.setdefault((s, layout.lane_of(s, r)), []).append((s, r))
    pending = {lane: zip(*(lists[seat] for seat in seats), strict=True) for lane, seats in lanes.items()}
    heads = {lane: next(entries) for lane, entries in pending.items()}
    done: set[Action] = set()
    order: list[tuple[int, int, Action]] = []
    progress = True
    while progress:
        progress = False
        for lane in list(heads):
            while lane in heads and all(need in done for act in heads[lane] for need in _needs(layout, act)):
                order += [(*seat, act) for seat, act in zip(lanes[lane], heads[lane], strict=True) if act.is_compute]
                done.update(heads.pop(lane))
                if (following := next(pending[lane], None)) is not None:
                    heads[lane] = following
                progress = True
    stuck = [act.name for head in heads.values() for act in head]
    assert not stuck, f"these actions wait for each other: {stuck}"
    return order


def _needs(layout: Layout, action: Action) -> Iterable[Action]:
    """As `dependencies`; a reduction needs the backwards of all replicas."""
    if action.kind is not Kind.REDUCE:
        return dependencies(layout, action)
    stage, num_parts = action.stage, len(layout.parts(action.stage))
    parts = [action.part] if layout.plan.steps_part_by_part else range(num_parts)
    return (Action(Kind.BACKWARD, stage, tile, part, num_parts) for part in parts for tile in layout.tiles[stage])
