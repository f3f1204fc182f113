"""The moment of a step at which a rank holds most: full of tiles, somewhere on the first backward's way down.

Going down, a backward frees what layers kept, while the gradients of a layer fill beside those of the layer above, which
are being reduced, and its weights lie beside those of the layer below, which are being fetched.
"""

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from hethub.predictor.memory.activations import Tiles
from hethub.predictor.memory.shards import Holdings, Shard
from hethub.spec.layout.bind import Seat


class Moment(NamedTuple):
    """Bytes of activations, and elements of units at hand: of their weights and of their gradients."""

    activations: float
    weights: float
    gradients: float


def moments(shard: Shard, seat: Seat, tiles: Tiles) -> Iterator[Moment]:
    """The moments that can be a rank's peak."""
    layout = shard.layout
    if layout.plan.goes_part_by_part:
        return _part_by_part(shard, tiles)
    lane = layout.lane_of(seat.stage, seat.replica)
    again = layout.loads[seat.stage][lane].num_tiles > layout.in_flight[seat.stage][seat.replica]
    return _layer_by_layer(shard.holdings, tiles, again)


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


def _part_by_part(shard: Shard, tiles: Tiles) -> Iterator[Moment]:
    """Part by part, all tiles of one before the next: what those behind have kept is gone."""
    kept = [tiles.activations - freed for freed in accumulate(tiles.freed_by_part[:0:-1], initial=0.0)][::-1]
    for part, passed, weights, gradients in shard.descents:
        yield Moment(kept[part] - passed * tiles.freed_by_layer, weights, gradients)
