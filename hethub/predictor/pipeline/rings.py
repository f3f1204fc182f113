"""Which ranks sum a stage's gradients together, what each of them steps of it, and how long that takes."""

from collections.abc import Callable
from itertools import accumulate, pairwise

from hethub.predictor.cost.cache import memoized
from hethub.predictor.cost.groups import UNEVEN, Group, Operation
from hethub.predictor.cost.links import Network
from hethub.predictor.cost.software import Software
from hethub.spec.layout.bind import Layout
from hethub.spec.plan import ReplicaSpec


class Rings:
    """The groups over a stage's replicas. `layer_parameters` are those of a layer on the stage's fullest rank."""

    def __init__(
        self, layout: Layout, software: Software, network: Network, layer_parameters: Callable[[int], float]
    ) -> None:
        self.layout, self.software, self.network = layout, software, network
        self._layer_parameters = layer_parameters

    def tensor_parallel(self, replica: ReplicaSpec) -> int:
        """The replica's tensor-parallel degree; context-parallel ranks are the rest of it."""
        return replica.tp // self.software.context_parallel

    def rank_fractions(self, replica: ReplicaSpec) -> list[float]:
        """Each rank's fraction of heads, columns and vocabulary."""
        tp = self.tensor_parallel(replica)
        if replica.tensor_shares is None:
            return [1.0 / tp] * replica.tp
        whole = sum(replica.tensor_shares)
        return [share / whole for share in replica.tensor_shares]

    @memoized
    def group(self, stage: int, position: int) -> Group:
        """The ranks at one position of every replica: who sums one shard's gradients."""
        return self.network.group(self._ranks(stage, position), self._owned(stage))

    def _ranks(self, stage: int, position: int) -> list[int]:
        """Positions are those of the widest replica, and several of its ranks hold what one of a narrower replica does."""
        replicas = self.layout.stages[stage].replicas
        widest = max(replica.tp for replica in replicas)
        return [replica.ranks[position * replica.tp // widest] for replica in replicas]

    @memoized
    def unlike(self, stage: int) -> list[tuple[Group, int, float]]:
        """The unlike groups that sum a stage's gradients, how many like each share an interface, and what part of a rank's
        parameters each sums: all, or a head of keys and values that several ranks of a replica hold."""
        model, replicas = self.layout.model, self.layout.stages[stage].replicas
        widest, heads = max(replica.tp for replica in replicas), model.num_kv_heads
        found = {self.group(stage, at): (self._sharing(stage, at), 1.0) for at in range(widest)}
        if widest > heads * self.software.context_parallel:
            part = 2 * model.hidden * model.head_size / self._layer_parameters(stage)
            for head in range(heads):
                holders = [r.ranks[head * r.tp // heads : -(-(head + 1) * r.tp // heads)] for r in replicas]
                group = self.network.group(sum(holders, ()))
                found.setdefault(group, (self.network.sharing(group), part))
        return [(group, *rest) for group, rest in found.items()]

    def _sharing(self, stage: int, position: int) -> int:
        """How many such groups share a machine's interfaces at once, if all its accelerators are in one: those that meet
        the same rank of a narrower replica take turns."""
        group, pieces = self.group(stage, position), self._pieces(stage)
        if self._most_pieces(stage) == 1:
            return self.network.sharing(group)
        on_machine, at_once = dict(group.machines), list[int]()
        for replica, rank in zip(self.layout.stages[stage].replicas, self._ranks(stage, position), strict=True):
            machine = self.layout.cluster.places[rank].machine
            own = pieces[replica.tp, replica.tensor_shares][replica.ranks.index(rank)]
            groups = self.network.machines[machine].accelerators // on_machine[machine]
            at_once.append(groups * own // self._most_pieces(stage))
        return max(1, min(at_once))

    def seconds(self, stage: int, num_bytes: float, *, is_cut: bool = True) -> float:
        """Seconds of a reduce-scatter or an all-gather of what the stage's fullest rank holds, where nothing is sharded of
        half an all-reduce, in the group where it takes longest. Where replicas are cut (`is_cut`) in unlike places that
        rank meets others in each piece: these go beside each other, but for their bytes, which take the same links."""
        operation: Operation = "reduce_scatter" if self.layout.stages[stage].zero else "all_reduce"
        pieces = self._most_pieces(stage) if is_cut else 1

        def of_pieces(group: Group, sharing: int, part: float) -> float:
            one = self.network.reduce_scatter(group, part * num_bytes / pieces, sharing, operation)
            empty = min(one, self.network.reduce_scatter(group, 1e-6, sharing, operation))
            return empty + pieces * (one - empty)

        return self._unevenness(stage) * max(of_pieces(*each) for each in self.unlike(stage))

    def _most_pieces(self, stage: int) -> int:
        return max(map(max, self._pieces(stage).values()))

    @memoized
    def _pieces(self, stage: int) -> dict[tuple[object, ...], list[int]]:
        """By degree and shares of a replica, in how many pieces the cuts of all replicas leave what each of its ranks
        holds."""
        cuts = {
            (own.tp, own.tensor_shares): [0.0, *(round(cut, 6) for cut in accumulate(self.rank_fractions(own)))]
            for own in self.layout.stages[stage].unlike_replicas
        }
        ends = {end for own in cuts.values() for end in own}
        return {
            key: [sum(start < end <= stop for end in ends) for start, stop in pairwise(own)]
            for key, own in cuts.items()
        }

    @memoized
    def _owned(self, stage: int) -> dict[int, float]:
        """What each rank steps of what it holds, where that is not the same for all: by the shares that are given, or where
        replicas are of unlike degrees an equal part of the stage. Uneven cuts beside others are taken for even ones."""
        own = self.layout.stages[stage]
        if not own.zero or (not own.state_shares and (own.cut_alike or any(r.tensor_shares for r in own.replicas))):
            return {}
        held = [part for replica in own.replicas for part in self.rank_fractions(replica)]
        return {rank: own.every_state_share[rank] / part for rank, part in zip(own.ranks, held, strict=True)}

    def _unevenness(self, stage: int) -> float:
        """How much longer collectives over uneven parts take: as many buckets as the smallest part allows are cut
        evenly."""
        parts = self._owned(stage).values()
        least = len(self.layout.stages[stage].replicas) * min(parts, default=1.0)
        return 1.0 + (UNEVEN - 1.0) * (1.0 - min(1.0, least))
