"""What the ranks of a stage that hold equally many heads and columns have in memory, whatever their microbatches."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby, pairwise
from operator import itemgetter
from typing import NamedTuple

from hethub.predictor.cost.software import Software
from hethub.predictor.memory.activations import KeptPerSample, kept_per_sample
from hethub.predictor.memory.parameters import Held, RankWidths, StageParameters, rank_widths
from hethub.spec.layout.bind import Layout
from hethub.spec.layout.state import BUCKET_ELEMENTS, brought_elements, cut_full
from hethub.spec.layout.tensors import layer_tensors, tensor_parallel_shares
from hethub.spec.model import ModelSpec
from hethub.spec.plan import StageSpec
from hethub.spec.ranges import Range, from_sizes

Bucket = tuple[tuple[int, bool], ...]  # of its matrices the elements, and whether they are keys or values


class Descent(NamedTuple):
    """A moment of the backward through a stage's chunks: what has been freed, and the elements of units that are on the
    device."""

    chunk: int
    layers_passed: int  # in that chunk, by the first microbatch; below zero what the last has yet to pass
    gone: float  # part of that chunk, by all microbatches
    weights: float
    gradients: float


@dataclass(frozen=True, eq=False)
class Shard:
    """The part of a stage that one rank holds. Everything is computed once for all ranks that hold equally much."""

    layout: Layout
    stage: int
    widths: RankWidths
    software: Software
    width: int  # bytes of an activation and a weight

    @property
    def spec(self) -> StageSpec:
        return self.layout.stages[self.stage]

    @cached_property
    def parameters(self) -> StageParameters:
        return StageParameters.of(self.layout, self.stage, self.widths)

    @cached_property
    def whole(self) -> Held:
        """The parameters that the ranks of a replica hold together."""
        (alone,) = rank_widths(self.layout.model, 1)
        return StageParameters.of(self.layout, self.stage, alone).held

    @cached_property
    def kept(self) -> KeptPerSample:
        """The bytes that one sample keeps."""
        return kept_per_sample(self.layout, self.widths, self.software, self.width, self.spec.recompute)

    @cached_property
    def chunks(self) -> list[Range]:
        """The stage's chunks, as ranges of its layers."""
        return from_sizes(chunk.size for chunk in self.layout.chunks(self.stage))

    @property
    def _moves(self) -> bool:
        """Whether the stage's units come and go, instead of staying on the device."""
        return self.spec.zero >= 2 or "parameters" in self.spec.offload

    @cached_property
    def bucket_elements(self) -> float:
        """The elements that a rank holds of the two largest neighbouring buckets. They are buckets of units if these move, else
        of a chunk's matrices.

        A bucket ends where it is full, whatever part of it a rank holds. A tied head on another stage than the embedding is in
        none of them.
        """
        model, is_end = self.layout.model, self.stage in (0, self.layout.num_stages - 1)
        table = model.vocab * model.hidden if is_end and not self.layout.head_is_apart else 0
        part = self.parameters.held.own / self.whole.own
        full = part * (BUCKET_ELEMENTS + max(model.hidden * model.ffn, table))
        first, *others = self._updated_at_once
        chunks = [(self.parameters.tied, *first), *others]
        if self._moves:
            pairs = (a + b for chunk in chunks for a, b in pairwise(min(unit, full) for unit in chunk))
            return max(*pairs, *(min(2 * full, unit) for chunk in chunks for unit in chunk))
        return min(2 * full, max(map(sum, chunks)))

    def brought_at_once(self, owned: float) -> float:
        """Return the most elements that an update has on the device if `owned` elements of state are offloaded: those of three
        neighbouring batches, of one chunk if chunks are updated separately. A batch has what a rank owns of one bucket, and of
        further ones as long as `brought_elements` has room (hethub.runtime.state.optimizer)."""
        most, held = brought_elements(), self.parameters
        runs = [[sum(size for size, _ in bucket) for bucket in run] for run in self._buckets]
        part = owned / held.total * (sum(held.units) + held.tied) / sum(map(sum, runs))
        if part * max(map(max, runs)) >= 3 * most:
            return 3.0 * most
        updated = [runs]
        if self.layout.plan.steps_chunk_by_chunk:
            updated = [runs[own.start : own.stop] for own in self.chunks] if self._moves else [[run] for run in runs]
        return max(_largest_batches([part * size for run in own for size in run], most) for own in updated)

    @cached_property
    def _updated_at_once(self) -> list[tuple[float, ...]]:
        """The units of each chunk if chunks are updated when they are complete, else all units."""
        units = self.parameters.units
        if not self.layout.plan.steps_chunk_by_chunk:
            return [units]
        return [units[chunk.start : chunk.stop] for chunk in self.chunks]

    @cached_property
    def descents(self) -> tuple[Descent, ...]:
        """The moments of the backward through the stage's chunks, where these go one after another."""
        return _descents(*self._on_the_way, self.layout.plan.steps_chunk_by_chunk)

    def joining_descents(self, joined: float) -> tuple[Descent, ...]:
        """Return these moments where the fraction `joined` of a unit is joined in copies."""
        return _joining_descents(*self._on_the_way, joined)

    @property
    def _on_the_way(self) -> tuple[tuple[int, ...], int, tuple[Range, ...], bool]:
        held = self.parameters
        return held.units, held.tied, tuple(self.chunks), self.layout.passes_in_turn(self.stage)

    def joined(self, replica: int) -> float:
        """Return which part of its matrices a replica's ranks join in copies, because what they reduce with the same ranks is not
        contiguous. Other frameworks cut all replicas alike, so that nothing is copied."""
        if not self.software.gathers_ahead:
            return 0.0
        if self._cut_elsewhere(replica):
            return self._copied[False]
        replicas = self.spec.replicas
        return (
            self._copied[True] if len(replicas) > 1 and replicas[replica].tp > self.layout.model.num_kv_heads else 0.0
        )

    def _cut_elsewhere(self, replica: int) -> bool:
        """Whether a replica's ranks reduce neighbouring matrices, or parts of one matrix, with different ranks, because another
        replica is cut in other places."""
        model, spec = self.layout.model, self.spec.replicas[replica]
        if self.spec.cut_alike:
            return False
        own = _cuts(model, spec.tp, spec.tensor_shares)
        others = [_cuts(model, each.tp, each.tensor_shares) for each in self.spec.unlike_replicas]
        return any(not theirs <= mine for other in others for theirs, mine in zip(other, own, strict=True))

    @cached_property
    def _copied(self) -> dict[bool, float]:
        """Which part of the stage's matrices is copied: where only keys and values are summed over other ranks than the rest
        (True), and elsewhere (False). A unit that comes and goes under ZeRO is copied as a whole if any of it has to be."""
        found = {}
        for heads in (False, True):
            counts = [_in_copies(run, heads) for run in self._buckets]
            part = sum(copied for copied, _ in counts) / sum(every for _, every in counts)
            found[heads] = float(part > 0) if self.spec.zero >= 2 else part
        return found

    @cached_property
    def _buckets(self) -> list[tuple[Bucket, ...]]:
        """The stage's buckets before they are divided among ranks, by the layers that share them: each layer by itself where
        layers come and go, else all of a chunk."""
        layers = [1] * self.spec.num_layers if self._moves else [chunk.size for chunk in self.spec.chunks]
        last = len(layers) - 1 if self.stage == self.layout.num_stages - 1 else None
        return [
            _buckets(self.layout.model, run, self.stage == 0 and index == 0, index == last)
            for index, run in enumerate(layers)
        ]


@lru_cache(maxsize=1024)
def _buckets(model: ModelSpec, layers: int, first: bool, last: bool) -> tuple[Bucket, ...]:
    """Return the buckets of the matrices of neighbouring layers, with embedding and head where these belong to them."""
    table, layer = (
        [(model.vocab * model.hidden, False)],
        [tensor for tensor in layer_tensors(model, 0) if tensor.decays],
    )
    matrices = table * first + [(tensor.numel, tensor.axis == "kv") for tensor in layer] * layers
    matrices += table * (last and not model.tied_head)
    return tuple(tuple(matrices[own.start : own.stop]) for own in cut_full([size for size, _ in matrices]))


@lru_cache(maxsize=1024)
def _in_copies(buckets: tuple[Bucket, ...], heads: bool) -> tuple[int, int]:
    """Return the elements of buckets whose parts are not contiguous, and those of all buckets.

    Of a matrix that is a bucket of its own, what a group reduces is one run. Where `heads` are held by several ranks, so
    is what a bucket has of keys and values, and what stands on one side of these.
    """
    sizes = [
        (sum(size for size, _ in bucket), len(bucket) > 1 and (not heads or _runs(bucket) > 2)) for bucket in buckets
    ]
    return sum(size for size, apart in sizes if apart), sum(size for size, _ in sizes)


def _runs(bucket: Bucket) -> int:
    """Return of how many runs a bucket consists, of keys and values or of other matrices."""
    return sum(1 for _ in groupby(bucket, itemgetter(1)))


def _largest_batches(sizes: Sequence[float], most: int) -> float:
    """Return the largest sum of three neighbouring batches, if `sizes` are cut into pieces of at most `most` and a batch takes
    as many pieces as fit."""
    batches = [0.0]
    for size in sizes:
        full, rest = divmod(size, most)
        for piece in [float(most)] * int(full) + [rest] * (rest > 0):
            if batches[-1] + piece > most:
                batches.append(0.0)
            batches[-1] += piece
    return max(sum(batches[index : index + 3]) for index in range(len(batches)))


@lru_cache(maxsize=1024)
def _cuts(model: ModelSpec, tp: int, tensor_shares: tuple[float, ...] | None) -> list[set[int]]:
    """Return where the parts of a replica's ranks begin and end on heads, columns and vocabulary."""
    shares = tensor_parallel_shares(model, tp, tensor_shares)
    return [{edge for held in axis for edge in held} for axis in zip(*shares, strict=True)]


@lru_cache(maxsize=1024)
def _descents(
    units: tuple[int, ...], tied: int, ranges: tuple[Range, ...], in_turn: bool, stepped: bool
) -> tuple[Descent, ...]:
    """Return the moments of the backward of all microbatches through a chunk. Where they pass it in turn, its layers stay until
    the last of them has passed.

    The first microbatch enters the layers one by one, while the next layer is being fetched, and frees what it kept of the
    layers above. The gradients of the chunk above, or with a single microbatch those of the layer above, are still being
    reduced, unless that chunk was `stepped`.
    """
    found, above = [], 0.0
    for chunk in range(len(ranges) - 1, -1, -1):
        own, entered = ranges[chunk], 0.0
        for layer in range(own.stop - 1, own.start - 1, -1):
            entered = units[layer] + entered * in_turn
            highest = own.stop if in_turn else layer + 1
            at_hand = tied * (layer <= 1 or highest == len(units))  # with the first layer it is announced, too
            weights = entered + (units[layer - 1] if layer else 0.0) + at_hand
            found.append(Descent(chunk, own.stop - 1 - layer, 0.0, weights, entered + above + tied))
            above = above if in_turn else units[layer]
        above = units[own.start] * (not stepped)
    return tuple(found)


@lru_cache(maxsize=1024)
def _joining_descents(
    units: tuple[int, ...], tied: int, ranges: tuple[Range, ...], in_turn: bool, joined: float
) -> tuple[Descent, ...]:
    """Return the moments at which a unit's gradients are beside the parts in which they leave, after the last microbatch. By
    then the first one has entered all layers of a chunk that microbatches pass in turn, and the chunk below is being
    fetched."""
    found = []
    for chunk, own in enumerate(ranges):
        left = 0.0
        for layer in range(*own):
            left = units[layer] + left * in_turn
            lowest, highest = (own.start, own.stop) if in_turn else (layer, layer + 1)
            below = units[lowest - 1] if lowest else 0.0
            at_hand = tied * (lowest <= 1 or highest == len(units))
            gradients = left + joined * units[layer] + tied
            found.append(Descent(chunk, own.start - layer, 1.0, left + below + at_hand, gradients))
    return tuple(found)
