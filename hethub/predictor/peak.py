"""The moment of a step at which a rank holds most: full of tiles, somewhere on the first backward's way down.

Going down, a backward frees what layers kept, while the gradients of a layer fill beside those of the layer above, which
are being reduced, and its weights lie beside those of the layer below, which are being fetched.
"""

from collections.abc import Iterator
from typing import NamedTuple

from hethub.predictor.resident import Holdings, own_parts
from hethub.spec.layout import Layout, Seat


class Moment(NamedTuple):
    """Bytes of activations, and elements of units at hand: of their weights and of their gradients."""

    activations: float
    weights: float
    gradients: float


class Tiles(NamedTuple):
    """Activations when a rank is fullest: of all tiles, and what a tile frees with each of its layers, or a part with all
    its tiles."""

    activations: float
    freed_by_layer: float
    freed_by_part: tuple[float, ...]


def moments(layout: Layout, seat: Seat, holdings: Holdings, tiles: Tiles) -> Iterator[Moment]:
    """The moments that can be a rank's peak."""
    if layout.plan.schedule in ("layered", "ministages"):
        return _part_by_part(layout, seat.stage, holdings, tiles)
    limit = layout.in_flight[seat.stage][seat.replica]
    again = len(layout.lane_tiles(seat.stage, seat.replica)) > limit
    return _layer_by_layer(holdings, tiles, again)


def _layer_by_layer(holdings: Holdings, tiles: Tiles, again: bool) -> Iterator[Moment]:
    """A tile on its way down; `again`: another went before it, whose last reduction (a tied embedding's, where there is
    one) is still under way."""
    units, tied, top = holdings.units, holdings.tied, len(holdings.units) - 1
    for layer in range(top, -1, -1):
        above = units[layer + 1] if layer < top else (tied or units[0]) * again
        below = units[layer - 1] if layer else 0.0
        at_hand = tied if layer in (0, 1, top) else 0.0
        activations = tiles.activations - (top - layer) * tiles.freed_by_layer
        yield Moment(activations, units[layer] + below + at_hand, units[layer] + above + tied)


def _part_by_part(layout: Layout, stage: int, holdings: Holdings, tiles: Tiles) -> Iterator[Moment]:
    """All tiles on their way down through a part: its layers stay until the last of them has passed.

    The first tile enters them one by one, the next announced, and frees what it kept of those above.
    """
    units, activations = holdings.units, tiles.activations
    parts = [units[own.start : own.stop] for own in own_parts(layout, stage)]
    above = 0.0
    for part in range(len(parts) - 1, -1, -1):
        tied = holdings.tied * (part in (0, len(parts) - 1))
        downward = [*parts[part][::-1], parts[part - 1][-1] if part else 0.0]
        for passed in range(len(parts[part])):
            entered = sum(downward[: passed + 1])
            freed = passed * tiles.freed_by_layer
            weights = entered + downward[passed + 1] + tied
            yield Moment(activations - freed, weights, entered + above + holdings.tied)
        activations -= tiles.freed_by_part[part]
        above = parts[part][0]
