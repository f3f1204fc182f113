"""Tiles in flight by estimate: how long a tile takes to turn somewhere below and come back, and how many hide that.

Where stages have tiles of unlike sizes, the largest on the way counts: a stage with smaller ones runs several for it.
"""

from collections.abc import Sequence
from math import ceil
from typing import Protocol


class Passed(Protocol):
    """What a stage's estimate tells of its tiles."""

    @property
    def tile(self) -> float:
        """Seconds of one tile both ways."""

    @property
    def wave(self) -> int:
        """Samples of one tile on every replica."""


def round_trips(stages: Sequence[Passed], crossing: Sequence[float]) -> list[list[float]]:
    """Per stage s, for every stage from s on the seconds until what s sends down comes back from there, both passes of all
    included."""
    tiles, waves = [stage.tile for stage in stages], [stage.wave for stage in stages]
    if len(set(waves)) > 1:
        return [_unlike_trips(tiles[s:], waves[s:], crossing[s:]) for s in range(len(stages))]
    ends, starts, passed = [], [], 0.0
    for tile, across in zip(tiles, [*crossing, 0.0], strict=True):
        starts.append(passed)
        passed += tile
        ends.append(passed)
        passed += 2 * across
    return [[end - start for end in ends[s:]] for s, start in enumerate(starts)]


def _unlike_trips(tiles: list[float], waves: list[int], crossing: Sequence[float]) -> list[float]:
    """The round trips from the first of some stages where tiles are unlike."""
    found, passed, most, beside = [], 0.0, waves[0], 0.0
    for t, (tile, wave, across) in enumerate(zip(tiles, waves, [*crossing, 0.0], strict=True)):
        passed += tile
        if wave < most:
            beside = max(beside, (most / wave - 1) * tile)
        elif wave > most:
            most = wave
            beside = max([(most / w - 1) * own for own, w in zip(tiles[:t], waves[:t], strict=True)])
        found.append(passed + beside)
        passed += 2 * across
    return found


def default_flights(stages: Sequence[Passed]) -> list[int]:
    """About how many tiles each stage holds by default: what the one below does and one more of its tiles."""
    held = [1]
    for above, below in zip(stages[-2::-1], stages[:0:-1], strict=True):
        held.append(max(1, ceil((held[-1] + 1) * below.wave / above.wave)))
    return held[::-1]


def slowest_circuit(
    stages: Sequence[Passed], trips: Sequence[Sequence[float]], held: Sequence[int], samples: int
) -> float:
    """Seconds of `samples` at the rate of the slowest circuit, and of one tile through all stages: a tile's backward in
    stage s lets the next forward go down to stage t, where it comes before the backward that answers it as many tiles
    later as both hold."""
    behind = [stage.wave * (hold - 1) for stage, hold in zip(stages, held, strict=True)]
    slowest, wave = 0.0, 0
    for s, stage in enumerate(stages[:-1]):
        flight = behind[s] + stage.wave
        rate = max([way / max(flight - b, 1) for way, b in zip(trips[s][1:], behind[s + 1 :], strict=True)])
        if rate > slowest:
            slowest, wave = rate, stage.wave
    return slowest * max(samples - wave, 0.0) + trips[0][-1]


def enough_flights(
    stages: Sequence[Passed], trips: Sequence[Sequence[float]], pace: float, room: Sequence[int], tiles: Sequence[int]
) -> list[int]:
    """As many tiles per stage as its circuits need for `pace` samples per second, as far as there is room and there are
    tiles; never fewer samples than the stage below holds."""
    last = len(stages) - 1
    spare = 0 if len({stage.wave for stage in stages}) == 1 else 1
    held = [1] * (last + 1)
    for s in range(last - 1, -1, -1):
        need = max([pace * trips[s][t - s] + stages[t].wave * (held[t] - 1) for t in range(s + 1, last + 1)])
        wanted = ceil(need / stages[s].wave - 1e-6) + spare
        held[s] = max(min(wanted, room[s], tiles[s]), ceil(held[s + 1] * stages[s + 1].wave / stages[s].wave))
    return held
