"""Gradients summed over replicas and new weights sent to their holders, bucket by bucket.

A bucket's reduction starts when the last tile's backward has filled it, while backward goes on with the layers before.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hethub.communicator import World, all_gather_by_ranges, prepare_by_ranges, reduce_scatter_by_ranges
from hethub.runtime.parameter import Parameter
from hethub.runtime.storage import FlatStorage, put, take
from hethub.spec.ranges import Range
from hethub.spec.state import Bucket, Piece, StateMap

GroupOf = Callable[[tuple[int, ...]], dist.ProcessGroup | None]


@dataclass(frozen=True)
class LocalPiece:
    """A piece of a bucket as this rank holds it: where in its storage, and which part of that it steps."""

    piece: Piece
    ranges: tuple[Range, ...]  # in local storage
    owned: tuple[Range, ...]  # in local storage; empty where others step all of it
    decays: bool
    group: dist.ProcessGroup | None  # None where this rank is the only contributor

    @property
    def first_contributor(self) -> int:
        return self.piece.group.contributors[0]


class Reducer:
    """One rank's share in all reductions of a step.

    `start_step` arms the parameters; their gradients then start the reductions in one fixed order. `finish` returns
    when every piece's owned part of `storage.grads` is the sum over replicas. `gather` spreads the owners' weights.
    """

    def __init__(self, state: StateMap, storage: FlatStorage, group_of: GroupOf, replica: tuple[int, ...]) -> None:
        self.storage, self.rank = storage, storage.seat.rank
        self.replica = replica
        self._replica_group = group_of(replica) if len(replica) > 1 else None
        order = _launch_order(state, self.rank)
        self.buckets = [self._localise(bucket, group_of) for bucket in order]
        self._bucket_of: dict[str, int] = {}
        for index, bucket in enumerate(order):
            for placed, run in storage.held:
                if bucket.span.contains(run):
                    self._bucket_of[placed.info.name] = index
        self.norms = self._copied_norms()
        self._missing: list[int] = []
        self._launched = 0
        self._works: list[tuple[dist.Work, LocalPiece, Tensor]] = []

    def _localise(self, bucket: Bucket, group_of: GroupOf) -> list[LocalPiece]:
        pieces = []
        for piece in bucket.pieces:
            ranks = piece.group.contributors
            if self.rank in ranks:
                pieces.append(
                    LocalPiece(
                        piece,
                        tuple(self.storage.locals(piece.runs)),
                        tuple(self.storage.locals(piece.owned_runs(self.rank))),
                        bucket.decays,
                        group_of(ranks) if len(ranks) > 1 else None,
                    )
                )
        return pieces

    def _copied_norms(self) -> Range | None:
        """The norms at the end of storage, where a replica's ranks hold copies that its first rank speaks for."""
        runs = [self.storage.local(run) for placed, run in self.storage.held if placed.info.axis is None]
        return Range(runs[0].start, runs[-1].stop) if runs and self._replica_group is not None else None

    @property
    def pieces(self) -> list[LocalPiece]:
        """All pieces that this rank contributes to, in launch order."""
        return [piece for bucket in self.buckets for piece in bucket]

    def start_step(self, num_tiles: int) -> None:
        """Expects the gradients of `num_tiles` tiles."""
        self._missing = [0] * len(self.buckets)
        self._launched = 0
        for name, parameter in self.storage.parameters.items():
            self._missing[self._bucket_of[name]] += 1
            parameter.start_step(num_tiles, self._parameter_done)

    def _parameter_done(self, parameter: Parameter) -> None:
        self._missing[self._bucket_of[parameter.name]] -= 1
        # All ranks launch in one order, whichever bucket is full first: a native library needs that.
        while self._launched < len(self.buckets) and self._missing[self._launched] == 0:
            for piece in self.buckets[self._launched]:
                if piece.group is not None:
                    self._launch(piece, piece.group)
            self._launched += 1

    def _launch(self, piece: LocalPiece, group: dist.ProcessGroup) -> None:
        flat = take(self.storage.grads, piece.ranges)
        if piece.piece.group.sharded:
            work = reduce_scatter_by_ranges(group, flat, piece.piece.cuts)
        else:
            work = dist.all_reduce(flat, group=group, async_op=True)
        self._works.append((work, piece, flat))

    def finish(self) -> None:
        """Waits for all reductions; then owned gradients are complete sums."""
        assert self._launched == len(self.buckets), "a parameter got fewer gradients than the step has tiles"
        for work, piece, flat in self._works:
            work.wait()
            put(self.storage.grads, piece.ranges, flat)
        self._works.clear()

    def gather(self) -> None:
        """Sends every owner's new weights to all holders."""
        works = []
        for piece in self.pieces:
            if piece.group is not None and piece.piece.group.sharded:
                flat = take(self.storage.weights, piece.ranges)
                works.append((all_gather_by_ranges(piece.group, flat, piece.piece.cuts), piece, flat))
        for work, piece, flat in works:
            work.wait()
            put(self.storage.weights, piece.ranges, flat)
        if self.norms is not None:
            norms = self.storage.weights[self.norms.start : self.norms.stop]
            dist.broadcast(norms, group=self._replica_group, group_src=sorted(self.replica).index(self.replica[0]))


def _launch_order(state: StateMap, rank: int) -> list[Bucket]:
    """The buckets that a rank holds a part of, in the order in which backward completes them.

    Matrices from the last layer to the first, then norms, then what another stage contributes to.
    """
    stage = state.layout.seats[rank].stage
    own = [bucket for bucket in state.buckets if bucket.stage == stage]
    tied = [
        b
        for b in state.buckets
        if any(rank in p.group.contributors and p.group.owners != p.group.contributors for p in b.pieces)
    ]
    matrices = [bucket for bucket in reversed(own) if bucket.decays and bucket not in tied]
    return matrices + [bucket for bucket in own if not bucket.decays] + tied


def group_ranks(state: StateMap) -> list[tuple[int, ...]]:
    """Every set of ranks that needs a process group, in one order on all ranks: replicas first, then contributors."""
    layout = state.layout
    replicas = [replica.ranks for stage in layout.stages for replica in stage.replicas]
    contributors = [piece.group.contributors for bucket in state.buckets for piece in bucket.pieces]
    return list(dict.fromkeys(ranks for ranks in replicas + contributors if len(ranks) > 1))


def build_groups(world: World, state: StateMap) -> GroupOf:
    """Builds every process group the layout needs, connected; all ranks call it together.

    NCCL connects a group at its first use, which would otherwise fall into a backward, where one member can wait for
    another that waits for the first one's gradient.
    """
    groups = {ranks: world.group(ranks) for ranks in group_ranks(state)}
    pieces = [piece for bucket in state.buckets for piece in bucket.pieces if piece.group.sharded]
    for ranks in dict.fromkeys(piece.group.contributors for piece in pieces):
        if (group := groups.get(ranks)) is not None:
            prepare_by_ranges(group)
    for group in groups.values():
        if group is not None:
            dist.all_reduce(torch.zeros(1, device=world.device.torch_device), group=group)
    return lambda ranks: groups[ranks]
