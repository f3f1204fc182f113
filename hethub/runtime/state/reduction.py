"""Gradients summed over replicas and new weights sent to their holders, bucket by bucket.

A bucket's reduction starts when the last microbatch's backward has filled it, while backward goes on with the layers
before.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hethub.communicator import World, all_gather_by_ranges, prepare_by_ranges, reduce_scatter_by_ranges
from hethub.runtime.state.parameter import Parameter
from hethub.runtime.state.storage import FlatMap, FlatStorage, put, take
from hethub.spec.layout.bind import Assignment
from hethub.spec.layout.state import Bucket, Piece, StateMap, slice_runs
from hethub.spec.ranges import Range, from_sizes, overlap, split

GroupOf = Callable[[tuple[int, ...]], dist.ProcessGroup | None]


@dataclass(frozen=True)
class LocalPiece:
    """A piece of a bucket as this rank holds it.

    `grads` and `weights` are its places in `storage.grads` and `storage.weights`, or in the buffers of its unit where
    those come and go.
    """

    piece: Piece
    bucket: Bucket
    grads: tuple[Range, ...]
    weights: tuple[Range, ...]
    own: Range  # of the joined runs, what this rank steps; empty where others step all of it
    home: Range  # where that lies in what stays of the unit (`owned_grads`, `owned_weights`); empty without a unit
    group: dist.ProcessGroup | None  # None where this rank is the only contributor

    @property
    def first_contributor(self) -> int:
        return self.piece.group.contributors[0]

    def start_reduction(self, flat: Tensor) -> "dist.Work | None":
        """Sums `flat`, the joined runs, over the contributors: all of it, or this rank's own part of it."""
        if self.group is None:
            return None
        if self.piece.group.sharded:
            return reduce_scatter_by_ranges(self.group, flat, self.piece.cuts)
        return dist.all_reduce(flat, group=self.group, async_op=True)

    @property
    def gathers(self) -> bool:
        """Whether owners have new weights for others."""
        return self.group is not None and self.piece.group.sharded

    def start_gather(self, flat: Tensor) -> "dist.Work | None":
        """Fills `flat`, the joined runs, with every owner's part of it."""
        if not self.gathers:
            return None
        assert self.group is not None
        return all_gather_by_ranges(self.group, flat, self.piece.cuts)


class Reducer:
    """One rank's share in all reductions of a step.

    `start_step` arms the parameters whose gradients are held for the whole step; those then start the reductions in
    one fixed order. `finish` returns when every such piece's owned part of `storage.grads` is the sum over replicas.
    `gather` spreads the owners' weights, and `finish_gather` returns when a layer has them. What comes and goes is
    reduced and gathered by ZeroGradients and ZeroWeights, with the pieces of `units`.
    """

    def __init__(self, state: StateMap, storage: FlatStorage, group_of: GroupOf, replica: tuple[int, ...]) -> None:
        self.storage, self.rank = storage, storage.assignment.rank
        self.replica = replica
        self._replica_group = group_of(replica) if len(replica) > 1 else None
        order = _launch_order(state, storage.assignment)
        local = [self._localise(bucket, group_of) for bucket in order]
        self.pieces = [piece for bucket in local for piece in bucket]  # all that this rank contributes to
        self.units: dict[int, list[LocalPiece]] = {}
        for piece in self.pieces:
            if piece.bucket.unit is not None:
                self.units.setdefault(piece.bucket.unit, []).append(piece)
        held = [(bucket, own) for bucket, own in zip(order, local, strict=True) if not self._moves_gradients(bucket)]
        self._order, self.buckets = [bucket for bucket, _ in held], [own for _, own in held]
        self._bucket_of = {
            placed.info.name: index
            for index, bucket in enumerate(self._order)
            for placed, run in storage.held
            if bucket.span.contains(run)
        }
        self.norms = dict(self._copied_norms())
        self._missing: list[int] = []
        self._launched = 0
        self._works: list[tuple[dist.Work | None, LocalPiece, Tensor]] = []
        self._gathers: list[tuple[dist.Work, LocalPiece, Tensor]] = []

    def _moves_gradients(self, bucket: Bucket) -> bool:
        return self.storage.shards_gradients and bucket.unit is not None

    def _localise(self, bucket: Bucket, group_of: GroupOf) -> list[LocalPiece]:
        storage, pieces = self.storage, []
        grads: FlatMap = storage.grad_map
        weights: FlatMap = storage.weight_map
        owned: FlatMap | None = None
        if bucket.unit is not None and bucket.stage == storage.assignment.stage:
            grads = storage.unit_maps[bucket.unit] if storage.shards_gradients else grads
            weights = storage.unit_maps[bucket.unit] if storage.moves_weights else weights
            owned = storage.owned_maps[bucket.unit]
        for piece in bucket.pieces:
            ranks = piece.group.contributors
            if self.rank in ranks:
                group = group_of(ranks) if len(ranks) > 1 else None
                places = tuple(grads.locals(piece.runs)), tuple(weights.locals(piece.runs))
                own = piece.cuts[ranks.index(self.rank)]
                (home,) = owned.locals(piece.owned_runs(self.rank)) if own and owned is not None else [Range(0, 0)]
                pieces.append(LocalPiece(piece, bucket, *places, own, home, group))
        return pieces

    def _copied_norms(self) -> Iterator[tuple[int | None, Range]]:
        """Yield, per chunk, where the norms' weights lie, if the ranks of a replica hold copies of them: only the first rank's count."""
        if self._replica_group is None:
            return
        norms = [(placed, run) for placed, run in self.storage.held if placed.info.axis is None]
        for chunk in dict.fromkeys(placed.chunk for placed, _ in norms):
            runs = [self.storage.weight_map.local(run) for placed, run in norms if placed.chunk == chunk]
            yield chunk, Range(runs[0].start, runs[-1].stop)

    def saved_runs(self) -> list[list[Range]]:
        """Return, for each of `pieces`, the runs of the flat axis that this rank writes to a checkpoint. Every element is written
        once: by the rank that steps it or, where a whole group steps it, in equal ranges by the group's ranks."""
        found: list[list[Range]] = [[] for _ in self.pieces]
        alike: dict[tuple[int, ...], list[int]] = {}
        for number, each in enumerate(self.pieces):
            if each.piece.group.sharded:
                found[number] = each.piece.owned_runs(self.rank)
            else:
                alike.setdefault(each.piece.group.contributors, []).append(number)
        for ranks, numbers in alike.items():
            # in the order of launches, the same on every rank
            pieces = [self.pieces[number].piece for number in numbers]
            part = split(sum(piece.numel for piece in pieces), len(ranks))[ranks.index(self.rank)]
            for number, piece, place in zip(numbers, pieces, from_sizes(p.numel for p in pieces), strict=True):
                found[number] = slice_runs(piece.runs, overlap(part, place).shift(-place.start))
        return found

    def start_step(self, num_microbatches: int) -> None:
        """Expects the gradients of `num_microbatches` microbatches."""
        self._missing = [0] * len(self.buckets)
        self._launched = 0
        for name, index in self._bucket_of.items():
            self._missing[index] += 1
            self.storage.parameters[name].start_step(num_microbatches, self._parameter_done)

    def _parameter_done(self, parameter: Parameter) -> None:
        self._missing[self._bucket_of[parameter.name]] -= 1
        # Where units are reduced round by round, replicas reach their last microbatch in unlike rounds: the rest waits.
        if not self.storage.shards_gradients:
            self._launch_full()

    def _launch_full(self) -> None:
        """Launches what is full; all ranks in one order, whichever bucket is full first: a native library needs
        that."""
        while self._launched < len(self.buckets) and self._missing[self._launched] == 0:
            for piece in self.buckets[self._launched]:
                if piece.group is not None:
                    flat = take(self.storage.grads, piece.grads)
                    self._works.append((piece.start_reduction(flat), piece, flat))
            self._launched += 1

    def finish(self, chunk: int | None = None) -> None:
        """Waits for the reductions of a chunk, or of all; then its owned gradients are complete sums."""
        self._launch_full()
        due = [index for index, bucket in enumerate(self._order) if chunk is None or bucket.chunk == chunk]
        assert not due or self._launched > due[-1], "a parameter got fewer gradients than the step has microbatches"
        left = []
        for work, piece, flat in self._works:
            if chunk is None or piece.bucket.chunk == chunk:
                if work is not None:
                    work.wait()
                put(self.storage.grads, piece.grads, flat)
            else:
                left.append((work, piece, flat))
        self._works = left

    def gather(self, pieces: list[LocalPiece], chunks: set[int | None]) -> None:
        """Begins to send the owners' new weights of `pieces`, held for the whole run, to all holders, those first that
        the next forward needs first. Norms are there on return, those of `chunks` on all ranks of a replica."""
        for piece in sorted(pieces, key=lambda piece: (piece.bucket.decays, piece.bucket.layer)):
            flat = take(self.storage.weights, piece.weights)
            if (work := piece.start_gather(flat)) is not None:
                self._gathers.append((work, piece, flat))
        self._finish_gathers(lambda bucket: not bucket.decays)
        for chunk, norms in self.norms.items():
            if chunk in chunks:
                values = self.storage.weights[norms.start : norms.stop]
                dist.broadcast(values, self.replica[0], self._replica_group)

    def finish_gather(self, layer: int | None = None) -> None:
        """Returns when a layer of the stage has its new weights; by default, when all have."""
        self._finish_gathers(lambda bucket: layer is None or bucket.layer <= layer)

    def _finish_gathers(self, due: Callable[[Bucket], bool]) -> None:
        left = []
        for work, piece, flat in self._gathers:
            if due(piece.bucket):
                work.wait()
                put(self.storage.weights, piece.weights, flat)
            else:
                left.append((work, piece, flat))
        self._gathers = left


def _launch_order(state: StateMap, assignment: Assignment) -> list[Bucket]:
    """The buckets that a rank holds a part of, in the order in which backward completes them.

    Chunks from the last to the first, in each matrices from the last layer to the first, then norms; at the end what
    another stage contributes to.
    """
    rank, stage = assignment.rank, assignment.stage
    own = [bucket for bucket in state.buckets if bucket.stage == stage]
    tied = [b for b in state.buckets if b.chunk is None and any(rank in p.group.contributors for p in b.pieces)]
    order = []
    for chunk in reversed(range(len(state.layout.stages[stage].chunks))):
        inside = [bucket for bucket in own if bucket.chunk == chunk]
        order += [bucket for bucket in reversed(inside) if bucket.decays]
        order += [bucket for bucket in inside if not bucket.decays]
    return order + tied


def group_ranks(state: StateMap) -> list[tuple[int, ...]]:
    """Every set of ranks that needs a process group, in one order on all ranks: replicas first, then contributors."""
    layout = state.layout
    replicas = [replica.ranks for stage in layout.stages for replica in stage.replicas]
    contributors = [piece.group.contributors for bucket in state.buckets for piece in bucket.pieces]
    return list(dict.fromkeys(ranks for ranks in replicas + contributors if len(ranks) > 1))


def build_groups(world: World, state: StateMap) -> GroupOf:
    """Builds every process group the layout needs, connected; all ranks call it together.

    NCCL connects a group at its first use, which would otherwise fall into a backward, where one member can wait for
    another that waits for the first one's gradient. An all-gather of one element each is that use: the library's legs
    of a bridged group take part in it, as they do not in a small sum.
    """
    groups = {ranks: world.group(ranks) for ranks in group_ranks(state)}
    pieces = [piece for bucket in state.buckets for piece in bucket.pieces if piece.group.sharded]
    for ranks in dict.fromkeys(piece.group.contributors for piece in pieces):
        if (group := groups.get(ranks)) is not None:
            prepare_by_ranges(group)
    for group in groups.values():
        if group is not None:
            own = torch.zeros(1, device=world.device.torch_device)
            dist.all_gather([torch.empty_like(own) for _ in range(group.size())], own, group=group)
    return lambda ranks: groups[ranks]
