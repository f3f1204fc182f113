"""What the peers of `benchmarks/peers.py` are asked, and the cheapest of what they answer. Nothing of `hethub.planner` is here.

All get the same inputs as hethub: the layer and head times of `hethub.predictor` in place of their profiles, and data
sheets' link rates. Memory is counted as Sailor counts it (state of every parameter, micro-batches under way by stage, a
constant), with hethub's bytes; which plans fit in the end hethub's memory says, not theirs. Neither Metis nor Sailor has ZeRO
(but stages over unlike makers, which hethub runs with ZeRO 1 alone), recompute, offloading or another schedule than 1F1B.
"""

import heapq
from collections.abc import Iterator
from functools import cache, cached_property
from itertools import count
from typing import NamedTuple

from hethub.predictor import LayerCost
from hethub.spec.accelerator import Precision
from hethub.spec.cluster import ClusterSpec
from hethub.spec.model import ModelSpec
from hethub.spec.plan import PlanSpec, ReplicaSpec, StageSpec
from tests.oracle.peers.closed_form import KEPT, WIDTH, link_bytes_per_second

KEPT_PLANS = 2000  # by cost, of which the first that fits is the peer's
MOST_STAGES = 12
LARGEST_MICRO_BATCH = 16
FRAMEWORK_BYTES = 2 * 10**9  # Sailor's constant
RESERVE = 0.06  # of memory, as hethub keeps it


class Draft(NamedTuple):
    """A plan in short: per stage its layers and, per replica, ranks and samples of one of `microbatches` turns; or, with
    `dealt`, the size of all micro-batches, which are then dealt to the replicas in turn."""

    layers: tuple[int, ...]
    replicas: tuple[tuple[tuple[tuple[int, ...], int], ...], ...]
    microbatches: int
    dealt: int | None = None


class Question:
    """A question with what both searches ask of it, each asked once."""

    def __init__(self, model: ModelSpec, cluster: ClusterSpec, global_batch: int, seq_len: int, precision: Precision):
        self.model, self.cluster, self.precision = model, cluster, precision
        self.global_batch, self.seq_len = global_batch, seq_len
        self.layer_costs = [LayerCost(model, node.device, seq_len, precision) for node in cluster.nodes]
        self.width = WIDTH[precision]
        self.link = cache(self._link)
        self.seconds = cache(self._seconds)
        self.most_layers = cache(self._most_layers)

    @cached_property
    def ranks(self) -> list[list[int]]:
        """By device type (an entry of the cluster's nodes), its ranks."""
        found: list[list[int]] = [[] for _ in self.cluster.nodes]
        for place in self.cluster.places:
            found[self.type_of[place.rank]].append(place.rank)
        return found

    @cached_property
    def type_of(self) -> list[int]:
        """By rank."""
        names = [node.name for node in self.cluster.nodes]
        return [names.index(place.node.name) for place in self.cluster.places]

    @cached_property
    def machine_of(self) -> list[int]:
        """By rank."""
        return [place.machine for place in self.cluster.places]

    def _link(self, ranks: tuple[int, ...]) -> float:
        return link_bytes_per_second(self.cluster, ranks)

    def link_of(self, ranks: list[int]) -> float:
        """The slowest link among ranks; asked by two of each machine, which is all that matters."""
        known: dict[int, list[int]] = {}
        for rank in ranks:
            own = known.setdefault(self.machine_of[rank], [])
            if len(own) < 2:
                own.append(rank)
        return self.link(tuple(rank for own in known.values() for rank in own))

    def hidden_bytes(self, samples: int) -> int:
        return samples * self.seq_len * self.model.hidden * self.width

    def _seconds(self, device_type: int, tp: int, samples: int) -> tuple[float, float]:
        """Of one micro-batch, forward and backward: a layer, with its four all-reduces, and the head."""
        cost, summed = self.layer_costs[device_type], 0.0
        if tp > 1:
            link = self.link(tuple(self.ranks[device_type][:tp]))
            summed = 4 * 2 * (tp - 1) / tp * self.hidden_bytes(samples) / link
        return cost.layer(samples, tp).total + summed, cost.head(samples, 1 / tp).total

    def _most_layers(self, device_type: int, tp: int, samples: int, under_way: int, first: bool, last: bool) -> int:
        """As many layers as fit with so many micro-batches under way."""
        state = (18 if self.width == 2 else 4 * self.width) / tp
        room = self.cluster.nodes[device_type].device.memory_bytes * (1 - RESERVE) - FRAMEWORK_BYTES
        room -= (first * self.model.embedding_parameters + last * self.model.head_parameters) * state
        room -= last * samples * self.seq_len * self.model.vocab * (4 + self.width) / tp  # logits
        kept = KEPT * self.hidden_bytes(samples) * under_way / tp
        return max(0, int(room // (self.model.layer_parameters * state + kept)))

    def parameters(self, layers: int, first: bool, last: bool) -> int:
        ends = first * self.model.embedding_parameters + last * self.model.head_parameters
        return layers * self.model.layer_parameters + ends

    def plan_of(self, draft: Draft) -> PlanSpec:
        """The draft as a plan of hethub's runtime."""
        stages, start = [], 0
        for layers, own in zip(draft.layers, draft.replicas, strict=True):
            replicas = []
            for index, (ranks, samples) in enumerate(own):
                turns, micro_batch = draft.microbatches, samples
                if draft.dealt is not None:
                    total, micro_batch = self.global_batch // draft.dealt, draft.dealt
                    turns = total // len(own) + (index < total % len(own))
                if micro_batch and turns:
                    replicas.append(ReplicaSpec(ranks=ranks, micro_batch=micro_batch, samples=micro_batch * turns))
            makers = {self.cluster.places[replica.ranks[0]].island for replica in replicas}
            zero = 1 if len(makers) > 1 else 0
            stages.append(StageSpec(layers=((start, start + layers),), replicas=tuple(replicas), zero=zero))
            start += layers
        used = {rank for stage in stages for rank in stage.ranks}
        return PlanSpec(
            model=self.model.name, cluster=self.cluster.name, global_batch=self.global_batch, seq_len=self.seq_len,
            precision=self.precision, stages=tuple(stages), unused=tuple(set(range(self.cluster.size)) - used),
        )  # fmt: skip


class Best:
    """The cheapest drafts, each kept once."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Draft]] = []
        self._number = count()

    @property
    def limit(self) -> float:
        """A cost that would not be kept."""
        return -self._heap[0][0] if len(self._heap) == KEPT_PLANS else float("inf")

    def add(self, cost: float, draft: Draft) -> None:
        if cost < self.limit:
            put = heapq.heappushpop if len(self._heap) == KEPT_PLANS else heapq.heappush
            put(self._heap, (-cost, -next(self._number), draft))

    def drafts(self) -> Iterator[tuple[float, Draft]]:
        """The cheapest first."""
        for cost, _, draft in sorted(self._heap, reverse=True):
            yield -cost, draft
