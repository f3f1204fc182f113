"""The groups of ranks that sum a stage's gradients: what each rank steps, and how long their collectives take."""

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import NamedTuple

from hethub.predictor.cost.cache import memoized
from hethub.predictor.cost.groups import UNEVEN, Group, Operation
from hethub.predictor.cost.links import Network
from hethub.predictor.cost.software import Software
from hethub.spec.layout.bind import Layout
from hethub.spec.layout.shares import owner_fractions
from hethub.spec.plan import ReplicaSpec

RESOLUTION = 10**6  # to which shares of pieces are worked out


class Piece(NamedTuple):
    """A part of a stage's matrices that no replica cuts: it lies between two neighbouring cuts of any of the replicas. One rank
    of each replica holds and sums it."""

    ranks: tuple[int, ...]
    start: float  # of the whole cut dimension
    stop: float

    @property
    def part(self) -> float:
        return self.stop - self.start


class Ring(NamedTuple):
    """A group that sums a piece: its ranks, how many such rings share an interface, how large the piece is as a part of what
    the fullest rank holds, and by which factor it takes longer than if all ranks owned equal parts."""

    group: Group
    sharing: float
    part: float
    uneven: float


class Rings:
    """The groups over the replicas of each stage. `layer_parameters` gives the parameters of a layer on the fullest rank."""

    def __init__(
        self, layout: Layout, software: Software, network: Network, layer_parameters: Callable[[int], float]
    ) -> None:
        self.layout, self.software, self.network = layout, software, network
        self._layer_parameters = layer_parameters

    def tensor_parallel(self, replica: ReplicaSpec) -> int:
        """Return the replica's tensor-parallel degree. Its other ranks are context-parallel."""
        return replica.tp // self.software.context_parallel

    def rank_fractions(self, replica: ReplicaSpec) -> list[float]:
        """Return each rank's fraction of heads, columns and vocabulary."""
        uneven = replica.uneven_shares
        return [1.0 / self.tensor_parallel(replica)] * replica.tp if uneven is None else list(uneven)

    @memoized
    def pieces(self, stage: int) -> list[Piece]:
        """Return the stage's pieces in order. If all replicas are cut alike, they are what the ranks hold."""
        replicas, cuts = self.layout.stages[stage].replicas, self._cuts(stage)
        ends = sorted({end for own in cuts.values() for end in own})
        at = {key: [sum(cut <= start for cut in own) for start in [0.0, *ends[:-1]]] for key, own in cuts.items()}
        positions = [(replica, at[replica.tp, replica.uneven_shares]) for replica in replicas]
        return [
            Piece(tuple([replica.ranks[own[index]] for replica, own in positions]), *span)
            for index, span in enumerate(pairwise([0.0, *ends]))
        ]

    def _cuts(self, stage: int) -> dict[tuple[object, ...], list[float]]:
        """Return where the part of each rank ends, by degree and shares of the replica."""
        return {
            (own.tp, own.uneven_shares): [round(end, 6) for end in accumulate(self.rank_fractions(own))]
            for own in self.layout.stages[stage].unlike_replicas
        }

    @memoized
    def group(self, stage: int, piece: int) -> Group:
        """Return the ranks that sum a piece's gradients."""
        return self.network.group(self.pieces(stage)[piece].ranks, self._owned(stage)[piece])

    @memoized
    def unlike(self, stage: int) -> list[Ring]:
        """Return the rings that sum a stage's gradients, each sort once: those of its pieces, and those of the heads of keys and
        values that several ranks of a replica hold."""
        model, replicas = self.layout.model, self.layout.stages[stage].replicas
        heads, widest = model.num_kv_heads, max(replica.tp for replica in replicas)
        found = dict.fromkeys(self._of_pieces(stage))
        if widest > heads * self.software.context_parallel:
            part = 2 * model.hidden * model.head_size / self._layer_parameters(stage)
            known = {ring.group for ring in found}
            for head in range(heads):
                holders = [r.ranks[head * r.tp // heads : -(-(head + 1) * r.tp // heads)] for r in replicas]
                group = self.network.group(sum(holders, ()))
                if group not in known:
                    found[Ring(group, self.network.sharing(group), part, 1.0)] = None
        return list(found)

    @memoized
    def _of_pieces(self, stage: int) -> list[Ring]:
        pieces, most = self.pieces(stage), self._most(stage)
        return [
            Ring(
                self.group(stage, index), self._sharing(stage, index), piece.part / most, self._unevenness(stage, index)
            )
            for index, piece in enumerate(pieces)
        ]

    @memoized
    def _most(self, stage: int) -> float:
        """Return which fraction of the dimension that is cut the stage's fullest rank holds."""
        return max(max(self.rank_fractions(own)) for own in self.layout.stages[stage].unlike_replicas)

    def _sharing(self, stage: int, piece: int) -> float:
        """Return how many such rings share a machine's interfaces at once, if each of its accelerators at work is in one."""
        own, group = self.layout.stages[stage], self.group(stage, piece)
        even = own.cut_alike and own.replicas[0].uneven_shares is None  # then all send as much, without looking at each
        return max(1.0, min(
            (self.network.between.at_work(at) if even else self._at_once(stage)[at]) / count
            for at, count in group.machines
        ))  # fmt: skip

    @memoized
    def _at_once(self, stage: int) -> dict[int, float]:
        """Return what the accelerators of each machine send together, as a multiple of what the stage's fullest rank sends.
        Rings share an interface, or take turns on a rank that is in several, each with its own bytes."""
        parts, places = dict[int, list[float]](), self.layout.cluster.places
        for replica in self.layout.stages[stage].replicas:
            for rank, part in zip(replica.ranks, self.rank_fractions(replica), strict=True):
                parts.setdefault(places[rank].machine, []).append(part / self._most(stage))
        return {at: self.network.between.at_work(at) * sum(own) / len(own) for at, own in parts.items()}

    def seconds(self, stage: int, num_bytes: float, *, is_cut: bool = True) -> float:
        """Return the seconds of a reduce-scatter or an all-gather of what the stage's fullest rank holds, on the rank for which
        it takes longest; where nothing is sharded, of half an all-reduce.

        Where replicas are cut (`is_cut`) in different places, a rank is in one ring for each piece. Their latencies overlap,
        but their bytes take the same links."""
        operation: Operation = "reduce_scatter" if self.layout.stages[stage].zero else "all_reduce"

        def of(ring: Ring, part: float) -> float:
            return ring.uneven * self.network.reduce_scatter(ring.group, part, ring.sharing, operation)

        if not is_cut:
            return max([of(ring, num_bytes) for ring in self.unlike(stage)])
        taken = {ring: of(ring, ring.part * num_bytes) for ring in self.unlike(stage)}
        each = [*taken.values()]
        for meets in self._meets(stage):
            latencies = [min(taken[ring], of(ring, 1e-6)) for ring in meets]
            each.append(max(latencies) + sum(taken[ring] for ring in meets) - sum(latencies))
        return max(each)

    @memoized
    def _meets(self, stage: int) -> list[list[Ring]]:
        """Return the rings of each rank that holds several pieces."""
        pieces, rings = self.pieces(stage), self._of_pieces(stage)
        spans = {span for own in self._cuts(stage).values() for span in pairwise([0.0, *own])}
        found = (
            [ring for piece, ring in zip(pieces, rings, strict=True) if start <= piece.start and piece.stop <= stop]
            for start, stop in spans
        )
        return [own for own in found if len(own) > 1]

    @memoized
    def _owned(self, stage: int) -> list[dict[int, float]]:
        """Return what each rank steps of each piece where ranks do not all step the same: by the shares that the plan gives, or
        if replicas are cut differently, such that all ranks step as equal parts of the stage as the pieces allow."""
        own, pieces = self.layout.stages[stage], self.pieces(stage)
        if not own.zero or (not own.state_shares and own.cut_alike):
            return [{} for _ in pieces]
        if not own.state_shares and any(replica.uneven_shares for replica in own.replicas):
            sizes = [(tuple(sorted(piece.ranks)), round(RESOLUTION * piece.part)) for piece in pieces]
            total = sum(size for _, size in sizes)
            return [{r: float(part) for r, part in own.items()} for own in owner_fractions(stage, sizes, total, {})]
        held = dict(
            each for replica in own.replicas for each in zip(replica.ranks, self.rank_fractions(replica), strict=True)
        )
        return [{rank: own.every_state_share[rank] / held[rank] for rank in piece.ranks} for piece in pieces]

    def _unevenness(self, stage: int, piece: int) -> float:
        """Return the factor by which collectives over uneven parts take longer. As many buckets as the smallest part allows
        are cut evenly, the others are not."""
        parts = self._owned(stage)[piece].values()
        least = len(parts) * min(parts) / sum(parts) if any(parts) else 1.0
        return 1.0 + (UNEVEN - 1.0) * (1.0 - min(1.0, least))
