"""A stage of a draft by itself in closed form: seconds, samples and memory, for every number of layers at once."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hethub.planner.costs import UnitCosts, rank_parameters
from hethub.planner.draft import DraftStage, Seats
from hethub.planner.footprint import FIRST, LAST, ONLY, Mode
from hethub.planner.problem import Problem
from hethub.planner.samples import earliest_finish, largest_able, within
from hethub.predictor.links import Group
from hethub.predictor.state_costs import BUCKET_BYTES
from hethub.spec.plan import ScheduleName

_PROBED = (1e9, 2e9)  # bytes: seconds of a collective are linear in them
NEARLY = 1.02  # over the limit by the closed form, and still worth a look by the judge
_UNLIMITED = 1 << 30


class StageEstimate(NamedTuple):
    """Stages by themselves, in arrays of one shape: seconds of the busiest replica, of one tile each way, of the reduction
    and what follows it."""

    busy: np.ndarray
    forward: np.ndarray
    backward: np.ndarray  # what the tile above waits for
    tiles: np.ndarray  # of the busiest replica
    wave: np.ndarray  # samples of one tile on every replica
    reduce: np.ndarray
    tail: np.ndarray
    finish: np.ndarray  # optimizer and new weights
    most: np.ndarray  # tiles that every rank has memory for

    @property
    def tile(self) -> np.ndarray:
        """Seconds of one tile both ways."""
        return self.forward + self.backward


class Passes(NamedTuple):
    """Seconds of a tile's forward and backward, by layers."""

    forward: np.ndarray
    backward: np.ndarray


class Room(NamedTuple):
    """Bytes of a rank that tiles may fill, and what a tile held fills, and one whose weights' gradients are put off."""

    free: Any
    tile: Any
    put_off: Any


class StageTimes:
    """Estimates of stages. A place says whether a stage holds an end of the model (`footprint.position`)."""

    def __init__(self, problem: Problem, costs: UnitCosts) -> None:
        self.problem, self.costs = problem, costs
        self._layers = np.arange(problem.model.layers + 1.0)
        self._computing: dict[object, tuple[np.ndarray, np.ndarray]] = {}
        self._busy: dict[object, list[float]] = {}
        self._per_sample: dict[object, np.ndarray] = {}
        self._bytes: dict[object, tuple[float, ...]] = {}
        self._held: dict[object, np.ndarray] = {}
        self._largest: dict[object, int] = {}
        self._collectives: dict[object, tuple[float, float]] = {}

    def estimates(self, stage: DraftStage, place: int, even: bool, schedule: ScheduleName) -> StageEstimate:
        """The stage under a schedule, by its number of layers from 0; `even`: samples in equal parts, whatever the
        speeds."""
        found = self._in_waves(stage, place, even, schedule)
        if stage.zero >= 2 and stage.replicas > 1:
            found = self._in_rounds(stage, found, place)
        if schedule == "zero_bubble":
            put_off = min([self.costs.put_off(*own[:3], stage.recompute) for own in stage.seats])
            found = found._replace(backward=found.backward - put_off * self._layers)
        return found

    def busy(self, stage: DraftStage, place: int, even: bool) -> float:
        """Seconds of the stage's busiest replica on its tiles alone."""
        key = (stage.seats, stage.recompute, place, even)
        found = self._busy.get(key)
        if found is None:
            found = self._busy[key] = self._divided(stage, place, even)[0].tolist()
        return found[stage.layers]

    def samples(self, stage: DraftStage, place: int, even: bool) -> list[int]:
        """About how many samples each of the stage's replicas takes, by seats."""
        return [int(taken) for taken in self._divided(stage, place, even)[1][stage.layers]]

    def per_sample(self, stage: DraftStage, own: Seats, place: int) -> np.ndarray:
        """Seconds of a sample in a whole tile of one of the seats' replicas, by layers."""
        key = (own[:3], stage.recompute, place)
        found = self._per_sample.get(key)
        if found is None:
            whole = self._tile(stage, own, own.micro_batch, place)
            found = self._per_sample[key] = (whole.forward + whole.backward) / own.micro_batch
        return found

    def room(self, stage: DraftStage, own: Seats, place: int, schedule: ScheduleName, slack: float = 1.0) -> Room:
        """What one of the seats' ranks has for tiles, by the closed form."""
        return self._room(stage, own, place, schedule, slack, stage.layers)

    def _room(
        self, stage: DraftStage, own: Seats, place: int, schedule: ScheduleName, slack: float, layers: Any
    ) -> Room:
        """The same for other numbers of layers, or an array of them."""
        once, layer, tile, layer_tile, state_once, state_layer, put_off = self._coefficients(
            stage, own, place, schedule
        )
        shards = stage.replicas if stage.zero else 1
        kept = once + layer * layers + (state_once + state_layer * layers) / shards
        free = slack * self.problem.capacity(own.kind) - kept
        return Room(free, tile + layer_tile * layers, put_off * layers)

    def largest(self, stage: DraftStage, own: Seats, place: int, schedule: ScheduleName, held: int) -> int:
        """The largest micro-batch up to that of the seats with which their ranks have memory for so many tiles; named
        state shares are left to the judge. 0 where one sample is too much."""
        if stage.state_shares:
            return own.micro_batch
        key = (stage.layers, stage.recompute, stage.zero, stage.replicas, own[:3], place, schedule, held)
        found = self._largest.get(key)
        if found is None:

            def is_able(size: int) -> bool:
                room = self.room(stage, own._replace(micro_batch=size), place, schedule)
                return room.free >= held * max(room.tile, 1.0)

            found = self._largest[key] = largest_able(is_able, own.micro_batch)
        return found

    def collective(self, seats: Sequence[Seats]) -> tuple[float, float]:
        """Seconds of a reduce-scatter or an all-gather over replicas: of any, and more per byte."""
        key = tuple([(own.kind, own.tp, own.number) for own in seats])
        found = self._collectives.get(key)
        if found is None:
            group, network = self._group(seats), self.costs.network
            one, two = (network.reduce_scatter(group, num_bytes, self.costs.sharing(group)) for num_bytes in _PROBED)
            per_byte = (two - one) / (_PROBED[1] - _PROBED[0])
            found = self._collectives[key] = (one - per_byte * _PROBED[0], per_byte)
        return found

    def _divided(self, stage: DraftStage, place: int, even: bool) -> tuple[np.ndarray, np.ndarray]:
        """By layers the seconds of the busiest replica, and [layers, seats] the samples of each."""
        key = (stage.seats, stage.recompute, place, even)
        found = self._computing.get(key)
        if found is None:
            total = self.problem.batch.global_batch
            per_sample = np.stack([self.per_sample(stage, own, place) for own in stage.seats], axis=1)
            share = -(-total // stage.replicas)
            busy, taken = share * per_sample.max(axis=1), np.full(per_sample.shape, share)
            if not even and len(stage.seats) > 1:
                numbers = np.array([own.number for own in stage.seats])
                per_sample[0] = np.maximum(per_sample[0], 1e-12)  # no layers, no seconds
                busy = earliest_finish(total, per_sample, numbers)
                taken = np.clip(within(busy, per_sample), 1, total)
            found = self._computing[key] = (busy, taken)
        return found

    def _in_waves(self, stage: DraftStage, place: int, even: bool, schedule: ScheduleName) -> StageEstimate:
        samples = self.problem.batch.global_batch
        busy, taken = self._divided(stage, place, even)
        forward = backward = tiles = np.zeros(1)
        for own, each in zip(stage.seats, taken.T, strict=True):
            size = np.minimum(own.micro_batch, each)
            tile = self._cut_tiles(stage, own, size, place)
            part = each * own.number / samples  # what of the samples passes these
            forward, backward = forward + part * tile.forward, backward + part * tile.backward
            tiles = np.maximum(tiles, each / size)
        wave = sum([own.number * own.micro_batch for own in stage.seats])
        reduce, tail, gather = self._reduction(stage, place)
        return StageEstimate(
            busy=busy, forward=forward, backward=backward, tiles=tiles, wave=np.full_like(busy, min(wave, samples)),
            reduce=reduce, tail=tail, finish=gather + self._optimizer(stage, place),
            most=self._most(stage, place, schedule),
        )  # fmt: skip

    def _in_rounds(self, stage: DraftStage, alone: StageEstimate, place: int) -> StageEstimate:
        """The stage under ZeRO-2/3, its replicas in lockstep: every tile waits for gathers and reductions of its layers
        that compute does not hide."""
        latency, per_byte = self.collective(stage.seats)
        parameters, each = self._parameters(stage, place), np.maximum(self._layers, 1.0)
        gather = latency + per_byte * parameters * self.costs.width if stage.zero == 3 else np.zeros_like(parameters)
        reduce = latency + per_byte * parameters * max(4, self.costs.width)
        tiles = [self._tile(stage, own, own.micro_batch, place) for own in stage.seats]
        forward = np.maximum.reduce([gather, *(tile.forward for tile in tiles)]) + gather / each
        backward = np.maximum.reduce([gather + reduce, *(tile.backward for tile in tiles)]) + (gather + reduce) / each
        rounds = np.maximum(alone.tiles, self.problem.batch.global_batch / alone.wave)
        return alone._replace(
            busy=np.maximum(alone.busy, rounds * (forward + backward)), forward=forward, backward=backward, tiles=rounds,
            reduce=np.zeros_like(reduce), tail=reduce / each,
        )  # fmt: skip

    def _tile(self, stage: DraftStage, own: Seats, size: int, place: int) -> Passes:
        """Seconds of a tile of `size` samples."""
        rate = self.costs.rate(own.kind, own.tp, size, stage.recompute)
        forward, backward = self._layers * rate.layer.forward, self._layers * rate.layer.backward
        for there, part in ((place in (FIRST, ONLY), rate.embedding), (place in (LAST, ONLY), rate.head)):
            if there:
                forward, backward = forward + part.forward, backward + part.backward
        return Passes(forward, backward)

    def _cut_tiles(self, stage: DraftStage, own: Seats, sizes: np.ndarray, place: int) -> Passes:
        """The same where the size depends on the layers."""
        least, most = int(sizes.min()), int(sizes.max())
        if least == most:
            return self._tile(stage, own, most, place)
        forward, backward = np.zeros_like(self._layers), np.zeros_like(self._layers)
        for size in np.unique(sizes):
            tile, here = self._tile(stage, own, int(size), place), sizes == size
            forward[here], backward[here] = tile.forward[here], tile.backward[here]
        return Passes(forward, backward)

    def _most(self, stage: DraftStage, place: int, schedule: ScheduleName) -> np.ndarray:
        """By layers, the most tiles that every rank has memory for, or nearly so."""
        most = np.full(len(self._layers), float(_UNLIMITED))
        for own in () if stage.state_shares else stage.seats:
            room = self._room(stage, own, place, schedule, NEARLY, self._layers)
            most = np.minimum(most, np.trunc(room.free / np.maximum(room.tile, 1.0)))
        return most

    def _coefficients(self, stage: DraftStage, own: Seats, place: int, schedule: ScheduleName) -> tuple[float, ...]:
        mode = Mode(stage.zero, "1f1b" if schedule == "gpipe" else schedule)
        key = (own[:3], stage.recompute, mode, place)
        found = self._bytes.get(key)
        if found is None:
            at = self.problem.coefficients(*own[:3], stage.recompute, mode)
            found = self._bytes[key] = tuple(float(part[place]) for part in at)
        return found

    def _reduction(self, stage: DraftStage, place: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Seconds to reduce, its part that nothing hides, and to gather new weights."""
        parameters = self._parameters(stage, place)
        nothing = np.zeros_like(parameters)
        if stage.replicas == 1:
            return nothing, nothing, nothing
        latency, per_byte = self.collective(stage.seats)
        num_bytes = np.maximum(parameters * max(4, self.costs.width), 1.0)
        once = latency + per_byte * num_bytes
        reduce = once if stage.zero else 2 * once
        gather = latency + per_byte * parameters * self.costs.width if stage.zero else nothing
        return reduce, reduce * np.minimum(1.0, BUCKET_BYTES / num_bytes), gather

    def _parameters(self, stage: DraftStage, place: int) -> np.ndarray:
        key = (min([own.tp for own in stage.seats]), place)
        found = self._held.get(key)
        if found is None:
            found = rank_parameters(
                self.problem.model, key[0], self._layers, place in (FIRST, ONLY), place in (LAST, ONLY)
            )
            self._held[key] = found
        return found

    def _optimizer(self, stage: DraftStage, place: int) -> np.ndarray:
        owned = self._parameters(stage, place) / (stage.replicas if stage.zero else 1)
        first, *others = [self.costs.layer_costs[kind].optimizer(owned) for kind in {own.kind for own in stage.seats}]
        return np.maximum.reduce([first, *others]) if others else first

    def _group(self, seats: Sequence[Seats]) -> Group:
        """Where one rank of every replica is, as if they were the first to be seated."""
        ranks = []
        for kind, tp, _, count in seats:
            slots = (m[i] for m in self.problem.kinds[kind].machines for i in range(0, len(m) - tp + 1, tp))
            ranks += [rank for rank, _ in zip(slots, range(count), strict=False)]
        return self.costs.network.group(ranks)
