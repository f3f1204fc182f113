"""Schedules: pure functions from a layout to every replica's ordered actions, and a proof that they can finish.

One schedule, two interpreters: the predictor's simulator replays it against costs, the runtime's executor runs it.
What crosses between stages is no action of its own: a forward first waits for the transfers that end in its tile and
then sends those that start there (Layout.transfers); a backward does the same the other way.
"""

from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from hethub.spec.errors import BadInput
from hethub.spec.layout import Layout
from hethub.spec.tiling import Tile, overlapping


class Kind(StrEnum):
    """What a rank does; the names appear in traces, predicted and measured alike."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHT = "weight"  # the gradients of the weights, where a schedule puts them off
    REDUCE = "reduce"  # gradients summed over replicas; overlapped with the last backward, waited for here
    STEP = "step"  # global norm, clipping, optimizer
    GATHER = "gather"  # new weights from their owners to all holders


class Action(NamedTuple):
    """One entry of a rank's schedule; `tile` is given for forward and backward."""

    kind: Kind
    stage: int
    tile: Tile | None = None
    part: int = 0  # of the stage's parts (Layout.parts)

    @property
    def name(self) -> str:
        """`forward s0 [4, 6)`: equal in the prediction's and the run's trace."""
        place = f"{self.kind} s{self.stage}"
        return place if self.tile is None else f"{place} [{self.tile.samples.start}, {self.tile.samples.stop})"


EXECUTABLE = ("gpipe", "1f1b")
LARGEST_ZERO = 1


def check_executable(layout: Layout) -> None:
    """Raises BadInput naming what the plan asks for and this version's runtime does not do."""
    _check_schedule(layout)
    for index, stage in enumerate(layout.stages):
        if stage.zero > LARGEST_ZERO:
            raise BadInput(
                f"stages[{index}].zero is {stage.zero}, but this version shards up to zero: {LARGEST_ZERO}; set that, with "
                "state_shares and recompute where memory is short."
            )
        if stage.offload:
            raise BadInput(
                f"stages[{index}].offload: this version does not offload {', '.join(stage.offload)}; remove it."
            )


def _check_schedule(layout: Layout) -> None:
    if layout.plan.schedule not in EXECUTABLE:
        raise BadInput(
            f"schedule '{layout.plan.schedule}' cannot be executed by this version; use one of {', '.join(EXECUTABLE)}."
        )


def actions(layout: Layout, stage: int, replica: int) -> list[Action]:
    """The ordered actions of every rank of a replica for one step. Raises BadInput for a schedule not yet executable."""
    _check_schedule(layout)
    tiles = layout.tiles_of(stage, replica)
    order = list(_one_forward_one_backward(tiles, layout.in_flight[stage][replica]))
    compute = [Action(kind, stage, tile) for kind, tile in order]
    return [*compute, Action(Kind.REDUCE, stage), Action(Kind.STEP, stage), Action(Kind.GATHER, stage)]


def _one_forward_one_backward(tiles: tuple[Tile, ...], in_flight: int) -> Iterator[tuple[Kind, Tile]]:
    """1F1B: fill up to `in_flight` tiles, then a backward and a forward in turn, then drain. GPipe is in_flight = all."""
    for index in range(len(tiles) + in_flight):
        if index >= in_flight:
            yield Kind.BACKWARD, tiles[index - in_flight]
        if index < len(tiles):
            yield Kind.FORWARD, tiles[index]


def schedule(layout: Layout) -> dict[tuple[int, int], list[Action]]:
    """The actions of every replica, by (stage, replica)."""
    return {(s, r): actions(layout, s, r) for s, stage in enumerate(layout.stages) for r in range(len(stage.replicas))}


def dependencies(layout: Layout, action: Action) -> list[Action]:
    """The actions of other replicas that must have ended before this forward or backward can start."""
    tile = action.tile
    if tile is None:
        return []
    neighbour = action.stage + (-1 if action.kind is Kind.FORWARD else 1)
    if not 0 <= neighbour < layout.num_stages:
        return []
    return [Action(action.kind, neighbour, other) for other in overlapping(layout.tiles[neighbour], tile.samples)]


def execution_order(layout: Layout) -> list[tuple[int, int, Action]]:
    """A global order in which all compute actions can run, as (stage, replica, action): the proof of no deadlock.

    Raises AssertionError naming the actions that wait for each other if there is none.
    """
    pending = {seat: iter(acts) for seat, acts in schedule(layout).items()}
    heads = {seat: next(acts) for seat, acts in pending.items()}
    done: set[Action] = set()
    order: list[tuple[int, int, Action]] = []
    progress = True
    while progress:
        progress = False
        for seat, head in list(heads.items()):
            while head.tile is not None and all(needed in done for needed in dependencies(layout, head)):
                done.add(head)
                order.append((*seat, head))
                head, progress = next(pending[seat]), True
            heads[seat] = head
    stuck = [head.name for head in heads.values() if head.tile is not None]
    assert not stuck, f"these actions wait for each other: {stuck}"
    return order
