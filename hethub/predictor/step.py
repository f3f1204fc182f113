"""A whole step from a layout's costs: compute replayed, gradients reduced, optimizer stepped, and where the time went."""

from dataclasses import dataclass
from typing import NamedTuple

from hethub.predictor.costs import PlanCosts, TileCost
from hethub.predictor.simulator import Chain, Ends, Programme, interleaved, pipeline, replay
from hethub.spec.layout import Layout
from hethub.spec.schedule import Action, Kind, schedule
from hethub.spec.tiling import Tile


class Replay(NamedTuple):
    """Ends per (stage, replica), of equal replicas the first only unless every tile was replayed.

    Then the programme and the tiles' numbers in it are there as well.
    """

    ends: dict[tuple[int, int], Ends]
    programme: Programme | None
    numbers: dict[Tile, int]


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of a step, its parts on the bottleneck's own clock (they sum to `seconds`), and per-stage ends."""

    seconds: float
    breakdown: dict[str, float]
    bottleneck: tuple[int, int]
    reduce_end: tuple[float, ...]
    step_start: float
    step_end: dict[tuple[int, int], float]
    gather_end: dict[tuple[int, int], float]
    replay: Replay


def replay_plan(layout: Layout, costs: PlanCosts, full: bool = False) -> Replay:
    """The compute of a step; `full` replays every tile of every replica, as a timeline needs."""
    even = all(r.samples % r.micro_batch == 0 for r in layout.stages[0].replicas)
    if not full and even and costs.tiles_alike and layout.plan.num_chunks == 1:
        return Replay(_replay_chains(layout, costs), None, {})
    return _replay_tiles(layout, costs)


def _replay_chains(layout: Layout, costs: PlanCosts) -> dict[tuple[int, int], Ends]:
    """One pipeline per kind of replica chain; the ends stand under the chain's first replica."""
    ends: dict[tuple[int, int], Ends] = {}
    for replica in costs.chains:
        spec = layout.replica(0, replica)
        num_tiles, interleave = spec.samples // spec.micro_batch, costs.software.interleave
        chain = _chain(layout, costs, replica)
        found = pipeline(chain, num_tiles) if interleave == 1 else interleaved(chain, num_tiles, interleave)
        ends |= {(stage, replica): found[stage] for stage in range(layout.num_stages)}
    return ends


def _chain(layout: Layout, costs: PlanCosts, replica: int) -> Chain:
    stages, micro_batch = range(layout.num_stages), layout.replica(0, replica).micro_batch
    tiles = [costs.tile(stage, replica, micro_batch) for stage in stages]
    across = tuple(costs.boundary(stage, replica, replica, micro_batch) for stage in stages[:-1])
    return Chain(
        forward=tuple(tile.forward.total for tile in tiles),
        backward=tuple(tile.backward.total for tile in tiles),
        down=across,
        up=across,
        in_flight=tuple(layout.in_flight[stage][replica] for stage in stages),
    )


def _replay_tiles(layout: Layout, costs: PlanCosts) -> Replay:
    """Every tile of every replica, in the order that the executor runs them."""
    tiles = [tile for stage in layout.tiles for tile in stage]
    number = {tile: g for g, tile in enumerate(tiles)}
    cost = [costs.tile(tile.stage, tile.replica, tile.samples.size) for tile in tiles]
    needs_forward: list[list[tuple[int, float]]] = [[] for _ in tiles]
    needs_backward: list[list[tuple[int, float]]] = [[] for _ in tiles]
    under_way: dict[tuple[int, int, int, int], float] = {}
    for crossing in layout.transfers:
        for source, target, samples, _ in crossing:
            key = (source.stage, source.replica, target.replica, samples.size)
            if key not in under_way:
                under_way[key] = costs.boundary(*key)
            needs_forward[number[target]].append((number[source], under_way[key]))
            needs_backward[number[source]].append((number[target], under_way[key]))
    orders = {seat: _order(acts, number) for seat, acts in schedule(layout).items()}
    programme = Programme(
        orders=list(orders.values()),
        forward=[c.forward.total for c in cost],
        backward=[c.backward.total for c in cost],
        needs_forward=needs_forward,
        needs_backward=needs_backward,
    )
    return Replay(dict(zip(orders, replay(programme), strict=True)), programme, number)


def _order(acts: list[Action], number: dict[Tile, int]) -> list[int]:
    return [number[act.tile] if act.kind is Kind.FORWARD else ~number[act.tile] for act in acts if act.tile is not None]


def step_times(layout: Layout, costs: PlanCosts, full: bool = False) -> StepTimes:
    """The step from its first forward to the last new weight, and what the bottleneck replica spent it on."""
    played = replay_plan(layout, costs, full)
    reductions = [costs.state.reduction(stage) for stage in range(layout.num_stages)]
    reduce_end, ready = [], []
    for stage, reduction in enumerate(reductions):
        own = [ends for (s, _), ends in played.ends.items() if s == stage]
        ready.append(max(e.last_backward_end for e in own))
        window = max(e.last_backward_start for e in own)
        reduce_end.append(max(ready[stage] + reduction.tail_seconds, window + reduction.seconds))
    # The gradient norm is global: nobody steps before every stage is reduced.
    step_start = max(reduce_end)
    optimizer = {seat: costs.optimizer(*seat) for seat in played.ends}
    step_end = {seat: step_start + seconds for seat, seconds in optimizer.items()}
    gather_start = [max(end for (s, _), end in step_end.items() if s == stage) for stage in range(layout.num_stages)]
    gather_end = {(s, r): gather_start[s] + reductions[s].gather_seconds for s, r in played.ends}
    seconds = max(gather_end.values())
    busy = {seat: _busy(layout, costs, seat) for seat in _distinct(layout, costs, list(played.ends))}
    bottleneck = max(busy, key=lambda seat: busy[seat]["compute"] + busy[seat]["tp"] + busy[seat]["dp"])
    parts, end, stage = busy[bottleneck], played.ends[bottleneck], bottleneck[0]
    parts["pp"] = end.transfer_wait_seconds
    parts["dp"] += reduce_end[stage] - ready[stage] + reductions[stage].gather_seconds
    parts["optimizer"] = optimizer[bottleneck]
    parts["bubble"] = max(0.0, seconds - sum(parts.values()))
    return StepTimes(
        seconds=seconds,
        breakdown={key: parts[key] for key in ("compute", "bubble", "tp", "pp", "dp", "optimizer")},
        bottleneck=bottleneck,
        reduce_end=tuple(reduce_end),
        step_start=step_start,
        step_end=step_end,
        gather_end=gather_end,
        replay=played,
    )


def _distinct(layout: Layout, costs: PlanCosts, seats: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """One seat of each kind of replica and load: equal ones are equally busy."""
    seen: dict[object, tuple[int, int]] = {}
    for stage, replica in seats:
        spec = layout.replica(stage, replica)
        seen.setdefault((costs.kind(stage, replica), spec.micro_batch, spec.samples), (stage, replica))
    return list(seen.values())


def _busy(layout: Layout, costs: PlanCosts, seat: tuple[int, int]) -> dict[str, float]:
    """Seconds a replica spends on all its tiles by part."""
    spec = layout.replica(*seat)
    whole, rest = divmod(spec.samples, spec.micro_batch)
    weighted = [(whole, costs.tile(*seat, spec.micro_batch))] + ([(1, costs.tile(*seat, rest))] if rest else [])
    return {part: sum(count * _both(tile, part) for count, tile in weighted) for part in ("compute", "tp", "dp")}


def _both(tile: TileCost, part: str) -> float:
    return float(getattr(tile.forward, part) + getattr(tile.backward, part))
