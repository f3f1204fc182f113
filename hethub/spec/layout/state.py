"""Training state on one axis: who holds, who contributes to and who steps every element of the parameters.

All parameters lie on one flat axis: stage after stage, each stage's matrices in forward order, then its norms, every
tensor with its cut dimension first. Shards, reductions, owners and checkpoints are ranges of this axis.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from pathlib import Path

from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import asked_by
from hethub.spec.layout.bind import Assignment, Layout, bind
from hethub.spec.layout.shares import cut_buckets, owner_fractions
from hethub.spec.layout.tensors import EMBEDDING, RankShares, TensorInfo, layer_tensors, stage_tensors
from hethub.spec.model import ModelSpec
from hethub.spec.plan import PlanSpec, StageSpec
from hethub.spec.ranges import Range, overlap, refine

BUCKET_ELEMENTS = 4 * 2**20
BROUGHT_BUCKETS = 2  # so much of offloaded state comes to the device at a time: its copies outlast what the host does


def brought_elements() -> int:
    """Elements of offloaded state that come to the device at a time."""
    return BROUGHT_BUCKETS * BUCKET_ELEMENTS


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A parameter, its run on the flat axis and the stage whose state counts it.

    `unit` is what comes and goes together where a rank does not hold all of its stage: the stage's layer (counted in
    model order; the embedding goes with the first, the head with the last), or, one above the last, a tied embedding
    that both ends use. Norms, and an embedding tied to the head of another stage, have none: they stay.

    `chunk` is the chunk of the stage whose backward, of all microbatches, completes the gradient; None where that takes
    another stage too.
    """

    info: TensorInfo
    span: Range
    stage: int
    unit: int | None
    chunk: int | None


@dataclass(frozen=True, slots=True)
class Group:
    """Elements that the same ranks contribute gradients to.

    `contributors` hold partial sums that add up to the gradient, ordered by rank; `owners` are those among them that
    may step: all, but where shares are named those of the stage alone. Without sharding every contributor steps.
    """

    stage: int
    contributors: tuple[int, ...]
    owners: tuple[int, ...]
    sharded: bool


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a bucket that one group reduces together: `runs` on the flat axis, cut over the contributors.

    `cuts[i]` is what contributor i owns, a range of the concatenated runs; without sharding each owns everything.
    """

    group: Group
    runs: tuple[Range, ...]
    cuts: tuple[Range, ...]

    @property
    def numel(self) -> int:
        return sum(run.size for run in self.runs)

    def owned_runs(self, rank: int) -> list[Range]:
        """The runs of the flat axis that `rank` steps."""
        cut = self.cuts[self.group.contributors.index(rank)]
        return list(slice_runs(self.runs, cut))


@dataclass(frozen=True, slots=True)
class Bucket:
    """Neighbouring tensors reduced together: matrices or norms of one chunk of a stage, of one unit where units move.

    `unit` is given where the stage's matrices come and go (`StateMap.moves`); `layer` is the first of the stage's layers
    that computes with it, norms and a tied embedding counted to the first.
    """

    stage: int
    span: Range
    decays: bool
    pieces: tuple[Piece, ...]
    unit: int | None
    chunk: int | None
    layer: int


def cut_full(sizes: Sequence[int]) -> list[Range]:
    """Neighbouring tensors of so many elements in buckets, each closed once it holds BUCKET_ELEMENTS: ranges of their
    indices."""
    cuts, held = [0], 0
    for index, size in enumerate(sizes, 1):
        held += size
        if held >= BUCKET_ELEMENTS or index == len(sizes):
            cuts, held = [*cuts, index], 0
    return [Range(start, stop) for start, stop in pairwise(cuts)]


def slice_runs(runs: Sequence[Range], cut: Range) -> list[Range]:
    """The part `cut` of the concatenation of `runs`, as runs again."""
    result, position = [], 0
    for run in runs:
        part = overlap(cut, Range(position, position + run.size))
        if part:
            result.append(part.shift(run.start - position))
        position += run.size
    return result


@dataclass(frozen=True)
class StateMap:
    """Every parameter element's holders, contributors and owners under a layout."""

    layout: Layout

    @cached_property
    def tensors(self) -> tuple[PlacedTensor, ...]:
        """All parameters in order of the flat axis."""
        placed, position = [], 0
        for stage, spec in enumerate(self.layout.stages):
            layer_of = self._layers_by_name(spec)
            for info in stage_tensors(self.layout.model, spec.chunks):
                span = Range(position, position + info.numel)
                layer = layer_of.get(info.name, 0 if info.name == EMBEDDING else spec.num_layers - 1)
                placed.append(
                    PlacedTensor(info, span, stage, self._unit(spec, info, layer), self._chunk(spec, info, layer))
                )
                position += info.numel
        return tuple(placed)

    def _layers_by_name(self, spec: StageSpec) -> dict[str, int]:
        """The stage's layer, counted in model order, of every tensor inside a layer."""
        layers = [layer for chunk in spec.chunks for layer in range(*chunk)]
        return {
            info.name: index for index, layer in enumerate(layers) for info in layer_tensors(self.layout.model, layer)
        }

    def _unit(self, spec: StageSpec, info: TensorInfo, layer: int) -> int | None:
        if not info.decays:
            return None
        if info.name == EMBEDDING and self.layout.model.tied_head:
            return None if self.layout.head_is_apart else spec.num_layers
        return layer

    def _chunk(self, spec: StageSpec, info: TensorInfo, layer: int) -> int | None:
        if info.name == EMBEDDING and self.layout.head_is_apart:
            return None
        return chunk_of(spec, layer)

    def level(self, stage: int) -> int:
        """The ZeRO level at which the stage's ranks hold state: its own, but 1 at most where one replica holds it
        all."""
        spec = self.layout.stages[stage]
        return spec.zero if len(spec.replicas) > 1 else min(spec.zero, 1)

    def moves(self, stage: int) -> bool:
        """Whether weights or gradients of the stage's matrices come and go, unit by unit."""
        return self.level(stage) >= 2 or "parameters" in self.layout.stages[stage].offload

    def units_at(self, stage: int, layer: int) -> tuple[int, ...]:
        """The units that a layer of the stage computes with."""
        last = self.layout.stages[stage].num_layers - 1
        shared = self.layout.model.tied_head and not self.layout.head_is_apart and layer in (0, last)
        return (layer, last + 1) if shared else (layer,)

    @cached_property
    def by_name(self) -> dict[str, PlacedTensor]:
        return {placed.info.name: placed for placed in self.tensors}

    def held_by(self, assignment: Assignment) -> list[tuple[PlacedTensor, Range]]:
        """The tensors that a rank holds and its run of each on the flat axis, in axis order.

        A tied head on another stage is a second holding of the embedding, under the embedding's name and span.
        """
        shares = self._shares[assignment.stage, assignment.replica][assignment.position]
        held = [placed for placed in self.tensors if placed.stage == assignment.stage]
        if self._holds_tied_head(assignment.stage):
            held.insert(0, self.by_name[EMBEDDING])
        return [(placed, placed.info.held(shares).shift(placed.span.start)) for placed in held]

    @cached_property
    def _shares(self) -> dict[tuple[int, int], list[RankShares]]:
        layout = self.layout
        return {
            (s, r): layout.shares(s, r) for s, stage in enumerate(layout.stages) for r in range(len(stage.replicas))
        }

    def _holds_tied_head(self, stage: int) -> bool:
        return self.layout.head_is_apart and stage == self.layout.num_stages - 1

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """All buckets in order of the flat axis; backward fills a stage's in the reverse order, norms last."""
        runs = {id(tensor): self._runs(tensor) for tensor in self.tensors}
        grouped = [(tensors, self._collect(runs[id(t)] for t in tensors)) for tensors in self._bucketed()]
        cuts = self._cuts(grouped)
        return tuple(self._bucket(tensors, by_group, cuts) for tensors, by_group in grouped)

    @cached_property
    def owned_elements(self) -> Counter[int]:
        """The number of elements that each rank steps."""
        found: Counter[int] = Counter()
        for piece in (piece for bucket in self.buckets for piece in bucket.pieces):
            for rank, cut in zip(piece.group.contributors, piece.cuts, strict=True):
                found[rank] += cut.size
        return found

    def _bucketed(self) -> list[list[PlacedTensor]]:
        """The tensors cut into buckets of about BUCKET_ELEMENTS, never across a stage or chunk, or from matrices into
        norms.

        A tied embedding on two stages is a bucket of its own: its reduction waits for both. Where units come and go,
        no bucket holds parts of two.
        """
        buckets: list[list[PlacedTensor]] = []
        for _, neighbours in groupby(self.tensors, self._kind):
            tensors = list(neighbours)
            buckets += [tensors[each.start : each.stop] for each in cut_full([tensor.span.size for tensor in tensors])]
        return buckets

    def _kind(self, tensor: PlacedTensor) -> tuple[object, ...]:
        """What tensors of one bucket have in common."""
        unit = tensor.unit if self.moves(tensor.stage) else None
        return tensor.stage, tensor.chunk, tensor.info.decays, unit

    def _runs(self, tensor: PlacedTensor) -> list[tuple[Range, Group]]:
        """The tensor cut where its contributors change."""
        replicas = [(tensor.stage, r) for r in range(len(self.layout.stages[tensor.stage].replicas))]
        apart = self.layout.head_is_apart and tensor is self.tensors[0]
        if apart:
            last = self.layout.num_stages - 1
            replicas += [(last, r) for r in range(len(self.layout.stages[last].replicas))]
        holdings = [held for s, r in replicas for held in self._contributions(tensor, s, r)]
        stage = self.layout.stages[tensor.stage]
        may_own = {rank for rank, _ in holdings} if apart and both_ends_step(self.layout) else set(stage.ranks)
        runs = []
        for run in refine(held for _, held in holdings):
            contributors = tuple(sorted(rank for rank, held in holdings if held.contains(run)))
            owners = tuple(rank for rank in contributors if rank in may_own)
            runs.append((run, Group(tensor.stage, contributors, owners, sharded=stage.zero > 0 or apart)))
        return runs

    def _contributions(self, tensor: PlacedTensor, stage: int, replica: int) -> list[tuple[int, Range]]:
        """Which rank of a replica contributes which run: a replicated tensor is complete on each, so the first stands
        for all."""
        shares, ranks = self._shares[stage, replica], self.layout.replica(stage, replica).ranks
        if tensor.info.axis is None:
            return [(ranks[0], tensor.span)]
        return [(rank, tensor.info.held(own).shift(tensor.span.start)) for rank, own in zip(ranks, shares, strict=True)]

    @staticmethod
    def _collect(runs: Iterable[list[tuple[Range, Group]]]) -> dict[Group, list[Range]]:
        by_group: dict[Group, list[Range]] = {}
        for tensor_runs in runs:
            for run, group in tensor_runs:
                own = by_group.setdefault(group, [])
                if own and own[-1].stop == run.start:
                    own[-1] = Range(own[-1].start, run.stop)
                else:
                    own.append(run)
        return by_group

    def _cuts(
        self, grouped: list[tuple[list[PlacedTensor], dict[Group, list[Range]]]]
    ) -> dict[Group, Iterator[list[Range]]]:
        """Return, for each sharded group, what its contributors own in one bucket after the other, by the stage's shares."""
        sizes: dict[Group, list[int]] = {}
        for _, by_group in grouped:
            for group, runs in by_group.items():
                sizes.setdefault(group, []).append(sum(run.size for run in runs))
        cuts: dict[Group, Iterator[list[Range]]] = {}
        for stage, spec in enumerate(self.layout.stages):
            groups = [group for group in sizes if group.stage == stage and group.sharded]
            over_both = [group for group in groups if set(group.owners) - set(spec.ranks)]
            for group in over_both:
                cuts[group] = iter(cut_buckets(sizes[group], [1 / len(group.owners)] * len(group.owners)))
            groups = [group for group in groups if group not in over_both]
            if groups:
                total = sum(sum(size) for group, size in sizes.items() if group.stage == stage)
                owners = [(group.owners, sum(sizes[group])) for group in groups]
                for group, own in zip(groups, owner_fractions(stage, owners, total, spec.state_shares), strict=True):
                    fractions = [own.get(rank, 0.0) for rank in group.contributors]
                    cuts[group] = iter(cut_buckets(sizes[group], fractions))
        return cuts

    def _bucket(
        self,
        tensors: list[PlacedTensor],
        by_group: dict[Group, list[Range]],
        cuts: dict[Group, Iterator[list[Range]]],
    ) -> Bucket:
        pieces = []
        for group, runs in by_group.items():
            numel = sum(run.size for run in runs)
            whole = [Range(0, numel)] * len(group.contributors)
            pieces.append(Piece(group, tuple(runs), tuple(next(cuts[group]) if group.sharded else whole)))
        first, span = tensors[0], Range(tensors[0].span.start, tensors[-1].span.stop)
        unit = first.unit if self.moves(first.stage) else None
        num_layers = self.layout.stages[first.stage].num_layers
        layer = min(t.unit if t.unit is not None and t.unit < num_layers else 0 for t in tensors)
        return Bucket(first.stage, span, first.info.decays, tuple(pieces), unit, first.chunk, layer)


def bind_file(path: Path | None, plan: PlanSpec, model: ModelSpec, cluster: ClusterSpec) -> Layout:
    """Do what `bind` does for a plan that a person may have written: check also that its state shares can be met. Errors name
    the plan's file, if it is in one."""
    with nullcontext() if path is None else asked_by(path):
        layout = bind(plan, model, cluster)
        if any(spec.state_shares for spec in layout.stages):
            _ = StateMap(layout).buckets  # which refuses a rank that holds too little for its share
        return layout


def both_ends_step(layout: Layout) -> bool:
    """Whether the ranks of a tied head step the embedding together with those of its stage, each an equal part.

    The sum is then one collective over all of them, which crosses between the ends once and not once per replica. Where
    an end names state shares, only the embedding's stage steps it.
    """
    return layout.head_is_apart and not any(layout.stages[end].state_shares for end in (0, -1))


def chunk_of(spec: StageSpec, layer: int) -> int:
    """The chunk that holds a layer of the stage, both counted in model order."""
    for index, chunk in enumerate(spec.chunks):
        if layer < chunk.size:
            return index
        layer -= chunk.size
    raise AssertionError("the stage has fewer layers")
