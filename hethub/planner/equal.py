"""Stages of given replicas: the best layers for each, exactly, for thousands of arrangements at once.

With the units of every stage given, a stage's busy time is linear in its layers, so the smallest deadline that holds
all layers follows by bisection.
"""

from typing import NamedTuple

import numpy as np

from hethub.planner.footprint import FIRST, LAST, MIDDLE, ONLY, Coefficients
from hethub.planner.problem import Problem
from hethub.planner.samples import earliest_finish
from hethub.planner.table import Table


class Cuts(NamedTuple):
    """Layers [arrangement, stage] and the estimated step [arrangement], infinite where nothing fits."""

    layers: np.ndarray
    seconds: np.ndarray


def cut_equally(
    problem: Problem, table: Table, rows: np.ndarray, composition: np.ndarray, *, memory_counts: bool
) -> Cuts:
    """The best layers for arrangements of combinations `rows`; `composition` [arrangement, stage, sort] counts the
    replicas of each sort in each stage."""
    count, stages = composition.shape[:2]
    total = problem.model.layers
    most = np.full((count, stages), float(total))
    if memory_counts:
        most = _most_layers(problem, table, rows, composition)
    able = (most.min(axis=1) >= 1) & (most.sum(axis=1) >= total)
    able &= composition.sum(axis=2).max(axis=1) <= problem.batch.global_batch
    layers, seconds = np.zeros((count, stages), dtype=np.int64), np.full(count, np.inf)
    if stages > total or not able.any():
        return Cuts(layers, seconds)
    rows, composition, most = rows[able], composition[able], most[able]
    per_layer, extra, latency = _linear(problem, table, rows, composition)
    found = _spread(total, per_layer, extra, most)
    through = latency * found
    layers[able] = found
    seconds[able] = (per_layer * found + extra).max(axis=1) + through.sum(axis=1) - through.max(axis=1)
    return Cuts(layers, seconds)


def room_for(problem: Problem, table: Table, rows: np.ndarray, replicas: np.ndarray) -> np.ndarray:
    """Whether all stages together could hold the layers if only one tile were held and nothing but layers: what fails
    here needs no cut. A stage that straddles sorts counts in full for each."""
    shards = replicas if problem.usual_zero > 0 else np.ones_like(replicas)
    memory = table.memory
    per_layer = memory.layer[rows, :, MIDDLE] + memory.layer_tile[rows, :, MIDDLE]
    per_layer = per_layer + memory.state_layer[rows, :, MIDDLE] / shards[:, None]
    counts = table.counts[rows]
    stages = np.where(counts > 0, np.ceil(counts / replicas[:, None]) + 1, 0.0)
    held = np.divide(table.capacity[rows], per_layer, out=np.zeros_like(per_layer), where=counts > 0)
    room: np.ndarray = (stages * held).sum(axis=1) >= problem.model.layers
    return room


def _linear(
    problem: Problem, table: Table, rows: np.ndarray, composition: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per stage, busy seconds per layer and beyond the layers, and one tile's seconds per layer."""
    samples = problem.batch.global_batch
    layer = table.layer[rows][:, None, :]
    present = composition > 0
    alone = present.sum(axis=2) == 1
    replicas = composition.sum(axis=2)
    # Samples come whole: alike replicas end with the one that has the most.
    per_layer = np.where(alone, np.ceil(samples / replicas) * np.where(present, layer, 0.0).sum(axis=2), 0.0)
    mixed = ~alone
    if mixed.any():
        of = np.nonzero(mixed)[0]
        per_layer[mixed] = earliest_finish(samples, table.layer[rows[of]], composition[mixed])
    extra = np.zeros(per_layer.shape)
    for stage, figures in ((0, table.embedding), (-1, table.head)):
        own = composition[:, stage, :]
        part = (own * figures[rows]).sum(axis=1) / (own * layer[:, 0, :]).sum(axis=1)
        extra[:, stage] += per_layer[:, stage] * part
    latency = np.where(present, table.tile[rows][:, None, :], 0.0).max(axis=2)
    return per_layer, extra, latency


def _most_layers(problem: Problem, table: Table, rows: np.ndarray, composition: np.ndarray) -> np.ndarray:
    """Per stage, the most layers that fit into every present sort's memory, tiles in flight by depth."""
    stages = composition.shape[1]
    held = np.arange(stages, 0, -1)[None, :, None]
    places = np.full(stages, MIDDLE)
    places[0], places[-1] = FIRST, LAST
    if stages == 1:
        places[0] = ONLY
    at = Coefficients(*(part[rows][:, :, places].transpose(0, 2, 1) for part in table.memory))
    shards = composition.sum(axis=2)[:, :, None] if problem.usual_zero > 0 else 1
    per_layer = at.layer + held * at.layer_tile + at.state_layer / shards
    once = at.once + held * at.tile + at.state_once / shards
    present = composition > 0
    room = table.capacity[rows][:, None, :] - once
    most = np.floor(np.divide(room, per_layer, out=np.full(room.shape, np.inf), where=present))
    fewest: np.ndarray = np.clip(most.min(axis=2), -1, problem.model.layers)
    return fewest


def _spread(total: int, per_layer: np.ndarray, extra: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Whole layers per stage, at least one and at most `most`, that sum to `total` with the smallest largest time."""

    def held(deadline: np.ndarray) -> np.ndarray:
        return np.minimum(np.maximum(np.floor((deadline[:, None] - extra) / per_layer + 1e-9), 1), most)

    low = (total + (extra / per_layer).sum(axis=1)) / (1 / per_layer).sum(axis=1)
    high = low + per_layer.max(axis=1)
    while (short := held(high).sum(axis=1) < total).any():
        low, high = np.where(short, high, low), np.where(short, 1.3 * high, high)
    while ((high - low) > 1e-6 * high).any():
        middle = (low + high) / 2
        enough = held(middle).sum(axis=1) >= total
        high, low = np.where(enough, middle, high), np.where(enough, low, middle)
    layers = held(high)
    while (over := layers.sum(axis=1) > total).any():
        last = np.where(layers > 1, per_layer * layers + extra, -1.0).argmax(axis=1)
        layers[over, last[over]] -= 1
    return layers.astype(np.int64)
