"""The costs of keeping a stage's training state in step: parameters of ranks, gathers, reductions, new weights."""

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from operator import mul
from typing import NamedTuple

from hethub.predictor.cost.cache import memoized
from hethub.predictor.cost.constants import is_cpu
from hethub.predictor.cost.links import Network
from hethub.predictor.cost.node_links import HostCopies
from hethub.predictor.cost.software import Software, element_bytes, gradient_bytes
from hethub.predictor.memory.activations import kept_of_layer, kept_per_sample
from hethub.predictor.memory.parameters import (
    Held,
    RankParameters,
    RankWidths,
    rank_widths,
    replica_widths,
    stepped,
)
from hethub.predictor.memory.state import zero_level
from hethub.predictor.pipeline.overlap import NO_ENDS, Ends, Round, excess, exposed
from hethub.predictor.pipeline.state.rings import Rings
from hethub.predictor.pipeline.state.tied_head import TiedHead
from hethub.spec.layout.bind import Layout
from hethub.spec.layout.execution import Kind
from hethub.spec.plan import ReplicaSpec

BUCKET_BYTES = 16 * 2**20  # of fp32 gradients; the last one cannot overlap with any backward


class Portion(NamedTuple):
    """The layers that one action runs: how many, whether the embedding comes first, and whether the head comes last."""

    layers: int
    first: bool
    last: bool


class Reduction(NamedTuple):
    """The seconds of a stage's reduction: all of it, the tail that no backward can hide, and sending new weights back.
    `slowed_seconds` are in both of the first two: by so much the sums slow the backward beside them."""

    seconds: float
    tail_seconds: float
    gather_seconds: float
    slowed_seconds: float = 0.0


class StateCosts:
    """The seconds of a layout's collectives over replicas. `passes` gives the seconds of a forward and a backward of one sample
    through a portion of a stage, on its fastest replica."""

    def __init__(
        self,
        layout: Layout,
        software: Software,
        network: Network,
        passes: Callable[[int, Portion], tuple[float, float]],
    ) -> None:
        self.layout, self.software, self.network, self.model = layout, software, network, layout.model
        self.host_copies = HostCopies(layout, network.fit)
        self._passes = passes
        self.width = element_bytes(software.math_precision(layout.plan.precision))
        last = layout.num_stages - 1
        self.whole = [Portion(stage.num_layers, s == 0, s == last) for s, stage in enumerate(layout.stages)]  # by stage
        self.tied = TiedHead(layout, software, network, self.width, self.gradient_wire_bytes)
        self._held: dict[tuple[object, ...], Held] = {}
        self.rings = Rings(
            layout, software, network, lambda stage: self.most_parameters(stage, Portion(1, False, False))
        )

    @cached_property
    def portions(self) -> tuple[tuple[Portion, ...], ...]:
        """The portion that each chunk of each stage runs: a model chunk, or under `layered` a layer."""
        return tuple(
            tuple(Portion(own.size, own.start == 0, own.stop == self.model.layers) for own in self.layout.chunks(stage))
            for stage in range(self.layout.num_stages)
        )

    @property
    def gradient_wire_bytes(self) -> int:
        """The bytes of one gradient on the wire. Gradients are accumulated and reduced in fp32 at least (rule 11 of
        exactness)."""
        return self.software.gradient_wire_bytes or gradient_bytes(self.width)

    def most_parameters(self, stage: int, portion: Portion | None = None) -> float:
        """Return the parameters of a portion, by default all of the stage, on the stage's fullest rank."""
        unlike = self.layout.stages[stage].unlike_replicas
        return max(self.rank_parameters(stage, replica, portion) for replica in unlike)

    def rank_parameters(self, stage: int, spec: ReplicaSpec, portion: Portion | None) -> float:
        """Return the parameters of a portion (None: all of the stage) on the replica's fullest rank. A tied head that both ends
        of the pipeline sum and step together is not counted."""
        held = self.held(spec, portion or self.whole[stage])
        return held.own if self.tied.group else held.own + held.apart

    def held(self, spec: ReplicaSpec, portion: Portion) -> Held:
        """Return the parameters of a portion on the replica's fullest rank."""
        key = (spec.tp, spec.tensor_shares, portion)
        found = self._held.get(key)
        if found is None:
            widths = dict.fromkeys(replica_widths(self.model, spec, self.software))
            found = self._held[key] = max((self.count(one, portion) for one in widths), key=sum)
        return found

    @memoized
    def count(self, widths: RankWidths, portion: Portion) -> Held:
        """Return the parameters of a portion on a rank with these widths."""
        rank = RankParameters.of(self.model, widths)
        count = rank.of_layers(*portion)
        if not self.layout.head_is_apart:
            return Held(count, 0)
        return Held(count - portion.first * rank.table, (portion.first or portion.last) * rank.table)

    def owned(self, stage: int, spec: ReplicaSpec, rank: int, portion: Portion | None) -> float:
        """Return how many parameters of a portion, by default all of the stage, a rank steps."""
        portion = portion or self.whole[stage]
        (alone,) = rank_widths(self.model, 1)
        whole = self.count(alone, portion)
        return stepped(self.layout, self.software, stage, rank, self.held(spec, portion), whole)

    @memoized
    def reduction(self, stage: int, portion: Portion | None = None) -> Reduction:
        """Return the seconds to sum the gradients of a portion, by default all of the stage, over its replicas and with a tied
        head's other copy, and to send new weights back (ZeRO-1 and 2). In rounds only the last layer's sum counts here; the
        others belong to the microbatches."""
        found, ends = self._over_replicas(stage, portion), portion or self.whole[stage]
        if self.layout.head_is_apart and (ends.first or ends.last):
            sent = (self.gradient_wire_bytes, self.gradient_wire_bytes, self.width if self.tied.group else 0)
            passing = [self._passing_seconds(stage, portion, each) for each in sent]
            summed, tail, gather = map(self.tied.beside, found, passing, sent)
            found = Reduction(summed, tail, gather, found.slowed_seconds)
        own = self.layout.stages[stage]
        if "parameters" in own.offload and len(own.replicas) > 1 and self.level(stage) in (1, 2):
            # New weights pass the accelerator to the others' hosts. At level 0 every rank has stepped all that it holds.
            copied = self._copied(stage, portion, 2 * self.width)
            found = found._replace(gather_seconds=found.gather_seconds + copied)
        return found

    def _passing_seconds(self, stage: int, portion: Portion | None, element_bytes: int) -> float:
        """Return the seconds beyond its latency of a collective over replicas with `element_bytes` for each parameter."""
        num_bytes = self.most_parameters(stage, portion) * element_bytes
        return self.rings.seconds(stage, num_bytes) - self.rings.seconds(stage, 1e-6) if num_bytes else 0.0

    def _over_replicas(self, stage: int, portion: Portion | None) -> Reduction:
        stage_spec, ends = self.layout.stages[stage], portion or self.whole[stage]
        if len(stage_spec.replicas) * self.software.context_parallel == 1:
            return Reduction(0.0, 0.0, 0.0)
        parameters = self.most_parameters(stage, portion)
        num_bytes = parameters * self.gradient_wire_bytes
        tail = min(1.0, BUCKET_BYTES / num_bytes) if self.software.overlapped_reduction else 1.0
        norms = 0.0 if portion and self.layout.plan.schedule == "layered" else self.norms_seconds(stage, ends)
        offloaded = "parameters" in stage_spec.offload
        if offloaded or stage_spec.zero >= 2:  # layers come and go one by one
            sums, gathers = self.reduce_seconds(stage, ends), self._by_layer(stage, ends, self.width)
            gather, first = sum(gathers), gathers[0]
        else:
            sums, gather = [self.rings.seconds(stage, num_bytes)], self.rings.seconds(stage, parameters * self.width)
            first = gather * tail
        if offloaded and any(sums):
            tail = min(tail, sums[0] / sum(sums))
        if stage_spec.zero == 0:
            return self._beside_backward(stage, ends, 2.0 * sum(sums), tail, 2.0 * norms, 0.0)
        if stage_spec.zero < 3 and self.software.overlapped_gather and not offloaded:
            shown = max(first, excess(gather, self._passes(stage, ends)[0], ends.layers))
            gather = shown + self.overlap_cost(stage) * (gather - shown)
        if stage_spec.zero == 1:
            return self._beside_backward(stage, ends, sum(sums), tail, norms, gather + norms)
        if stage_spec.zero == 3:
            # Nothing hides a step's first weights.
            gather = first if self.in_rounds(stage) else 0.0
        last = sums[0] if self.software.gathers_ahead else 0.0
        return Reduction(last + norms, last + norms, gather + norms)

    def norms_seconds(self, stage: int, portion: Portion) -> float:
        """Return the seconds that a portion's norms add to a reduction, or to sending weights, before passes hide them."""
        if not self.software.norms_apart or (self.level(stage) >= 2 and not self.in_rounds(stage)):
            return 0.0
        num_bytes = self.model.hidden * (2 * portion.layers + portion.last) * self.width
        return self.rings.seconds(stage, num_bytes, is_cut=False)

    def _beside_backward(
        self, stage: int, portion: Portion, seconds: float, tail: float, norms: float, gather: float
    ) -> Reduction:
        """Return a reduction of which no backward hides the fraction `tail` and the norms. It slows the backward that hides the
        rest."""
        slowed = self.slowed_seconds(stage, portion, seconds * (1.0 - tail))
        return Reduction(seconds + slowed + norms, seconds * tail + slowed + norms, gather, slowed)

    def slowed_seconds(self, stage: int, portion: Portion, hidden: float) -> float:
        """Return by how many seconds `hidden` seconds of sums slow the portion's backward. They overlap with at least the
        backward of one sample, which is counted, since microbatches may be so small."""
        return self.overlap_cost(stage) * min(hidden, self._passes(stage, portion)[1])

    def overlap_cost(self, stage: int) -> float:
        """Return by how much a second of hidden communication slows the compute that hides it. CPUs copy and sum with the cores
        that compute. In rehearsals nothing is slowed."""
        if self.by_turns[stage]:
            layer_bytes = self.width * self.most_parameters(stage, Portion(1, False, False))
            return self.network.copied_part(self.rings.group(stage, 0), layer_bytes)
        return 0.0 if self.layout.cluster.emulated else self.network.fit["overlap_cost"]

    def slowed_passes(
        self, stage: int, passes: tuple[float, float], portion: Portion, part: float
    ) -> tuple[float, float]:
        """Return by how many seconds collectives, which overlap with a chunk's passes once for all its microbatches, slow the
        forward and the backward of one microbatch that is the fraction `part` of them."""
        if not self.in_passes(stage) or self.by_turns[stage]:
            return 0.0, 0.0
        gather, cost = part * sum(self.gather_seconds(stage, portion)), self.overlap_cost(stage)
        reduce = part * sum(self.reduce_seconds(stage, portion)) if self.level(stage) >= 2 else 0.0
        return cost * min(gather, passes[0]), cost * min(gather + reduce, passes[1])

    def round_seconds(
        self,
        stage: int,
        passes: Sequence[float],
        portion: Portion,
        ends: Ends = NO_ENDS,
        messages: float = 0.0,
        rounds: float = math.inf,
    ) -> tuple[float, ...]:
        """Return the seconds that the collectives of a round (ZeRO-2 and 3) and weights from the host add to a microbatch, where
        compute does not hide them: to its forward, its backward and its weights' gradients that were put off, each a mean over
        `rounds`. The fourth figure is what is left of sums after the last round, without its last sum. All are 0 where a
        replay finds them.

        `passes` are the seconds of these passes through what goes `at_once`, of which `ends` are the embedding's and the
        head's. `messages` are the seconds of messages beside each pass."""
        if not self.goes_by_layer(stage) or self.is_replayed(stage):
            return 0.0, 0.0, 0.0, 0.0
        around = self.round(stage, passes, self.at_once(stage, portion, rounds), ends, messages)
        if not self.software.gathers_ahead:
            gather = sum(visit.gather for visit in around.forward)
            summed = sum(visit.gather + visit.reduction for visit in around.backward)
            return (
                self._shown(stage, gather, excess(gather, passes[0], portion.layers)),
                self._shown(stage, summed, excess(summed, passes[1], portion.layers)),
                0.0, 0.0,
            )  # fmt: skip
        found, left = around.shown(rounds, turns=not self.layout.plan.holds_all)
        added = [[self._shown(stage, *own) for own in visits] for visits in found]
        if len(around.forward) == portion.layers:
            return *map(sum, added), left
        # Layers that are alike share what is shown of them.
        alike = [(own == portion) / self.portions[stage].count(portion) for own in self.portions[stage]]
        parts = (alike, alike[::-1], alike[::-1])
        return *(sum(map(mul, part, own)) for part, own in zip(parts, added, strict=True)), left

    def round(
        self, stage: int, passes: Sequence[float], portion: Portion, ends: Ends = NO_ENDS, messages: float = 0.0
    ) -> Round:
        """Return the visits of a microbatch's passes through a portion."""
        gathers = [self.gather_seconds(stage, portion, kind) for kind in (Kind.FORWARD, Kind.BACKWARD)]
        reductions = self.reduce_seconds(stage, portion) if self.in_rounds(stage) else [0.0] * portion.layers
        return Round.of(passes, ends, gathers, reductions, messages)

    def goes_by_layer(self, stage: int) -> bool:
        """Whether the layers of a stage gather, sum or fetch from the host for each microbatch."""
        return self.in_rounds(stage) or (
            "parameters" in self.layout.stages[stage].offload and not self.in_passes(stage)
        )

    def is_replayed(self, stage: int) -> bool:
        """Whether a replay goes through these passes layer by layer. It does where a stage's chunks take turns, since what a
        pass waits for then depends on the passes before it."""
        return self.software.gathers_ahead and self.layout.plan.num_chunks > 1 and self.goes_by_layer(stage)

    def at_once(self, stage: int, portion: Portion, rounds: float) -> Portion:
        """Return what a microbatch passes without a pause when it passes a portion: all of the stage if there is one round."""
        return self.whole[stage] if rounds == 1 and self.software.gathers_ahead else portion

    def sums_under_way(self, stage: int) -> int:
        """Return of how many layers gradients may be summed at once: two, or one where ranks hold unlike parts. These are not
        contiguous and have to be copied (hethub/runtime/state/zero_gradients.py)."""
        return 2 if self.layout.stages[stage].cut_alike else 1

    def copying_seconds(self, stage: int, spec: ReplicaSpec, samples: int, layers: int, compute: float) -> float:
        """Return the seconds that copies of activations, in one direction and beside the next layer's compute, add to a pass."""
        recompute = self.layout.stages[stage].recompute
        each = samples * max(
            kept_of_layer(
                kept_per_sample(self.layout, widths, self.software, self.width, recompute), recompute, self.software
            )
            for widths in dict.fromkeys(replica_widths(self.model, spec, self.software))
        )
        places = self.layout.cluster.places
        slowest = max(self.host_copies.seconds_per_byte(places[rank]) for rank in spec.ranks)
        return exposed(compute, [each * slowest] * layers)

    def _shown(self, stage: int, seconds: float, exposed_seconds: float) -> float:
        """Return the seconds that communication adds to a pass: all that compute does not hide, and a part of what it hides,
        since collectives take processors and memory bandwidth from the compute beside them."""
        return exposed_seconds + self.overlap_cost(stage) * (seconds - exposed_seconds)

    def in_rounds(self, stage: int) -> bool:
        """Whether each microbatch of a stage has collectives of its own."""
        shared = self.layout.stages[stage].zero >= 2 and self.software.context_parallel > 1
        return shared or self.layout.plan.runs_in_rounds(stage)

    def in_passes(self, stage: int) -> bool:
        """Whether a stage fetches and sums once for each chunk and pass, for all microbatches together."""
        stage_spec = self.layout.stages[stage]
        moves = self.level(stage) >= 2 or "parameters" in stage_spec.offload
        return moves and not self.in_rounds(stage) and self.layout.plan.passes_in_turn(stage)

    @cached_property
    def by_turns(self) -> tuple[bool, ...]:
        """For each stage, whether its ranks communicate with the cores that compute. CPUs do, unless their time is emulated."""
        places, real = self.layout.cluster.places, not self.layout.cluster.emulated
        return tuple(real and all(is_cpu(places[rank].accelerator) for rank in s.ranks) for s in self.layout.stages)

    @property
    def steps_apart(self) -> bool:
        """Whether each chunk of a stage is stepped by itself."""
        return self.layout.plan.steps_chunk_by_chunk and self.layout.plan.num_chunks > 1

    def level(self, stage: int) -> int:
        """Return the ZeRO level that the stage's ranks really have."""
        return zero_level(self.layout, stage, self.software)

    def gather_seconds(self, stage: int, portion: Portion, kind: Kind = Kind.FORWARD) -> list[float]:
        """Return the seconds to bring each layer's weights for a pass, in model order: they are gathered under ZeRO-3, and
        fetched from the host where they are offloaded. Embedding and head go with the layer beside them."""
        level, offloaded = self.level(stage), "parameters" in self.layout.stages[stage].offload
        found = self._by_layer(stage, portion, self.width, kind) if level == 3 else [0.0] * portion.layers
        if offloaded:
            ends = self.ends_with_tied(stage, portion, kind)
            fetched = self._each_layer(portion, lambda of: self._copied(stage, of, self.width, alone=level == 3), ends)
            found = [a + b for a, b in zip(found, fetched, strict=True)]
        return found

    def _copied(self, stage: int, portion: Portion | None, each_bytes: int, *, alone: bool = False) -> float:
        """Return the seconds to copy a portion's state between host and accelerator, on the rank where it takes longest; if
        `alone`, only the state that no other rank has."""
        own, places = self.layout.stages[stage], self.layout.cluster.places
        return each_bytes * max(
            self.rank_parameters(stage, replica, portion)
            * (own.every_state_share[rank] * replica.tp if alone else 1)
            * self.host_copies.seconds_per_byte(places[rank])
            for replica in own.replicas
            for rank in replica.ranks
        )

    def reduce_seconds(self, stage: int, portion: Portion) -> list[float]:
        """Return the seconds of the reduce-scatter of each layer's gradients over the replicas, in model order."""
        return self._by_layer(stage, portion, self.gradient_wire_bytes)

    @memoized
    def _by_layer(self, stage: int, portion: Portion, width: int, kind: Kind | None = None) -> list[float]:
        """Return the seconds of a collective of each layer over the replicas, with `width` bytes for each parameter, in a pass of
        this kind or once in a step. Embedding and head go with the layer beside them."""
        return self._each_layer(
            portion,
            lambda of: self.rings.seconds(stage, width * self.most_parameters(stage, of)),
            self.ends_with_tied(stage, portion, kind),
        )

    def ends_with_tied(self, stage: int, portion: Portion, kind: Kind | None) -> tuple[bool, bool]:
        """Return whether a tied embedding is gathered with a portion's first layer, and whether with its last. It is gathered by
        itself where embedding and head are on one stage.

        A forward gathers it with the last layer, for the head, and it stays for the backward that follows. A backward gathers
        it with the first layer, and it stays for the next forward. Where weights' gradients are put off, or passes take
        turns, it does not stay, so the forward gathers it with its first layer too. With one or two layers it never leaves.
        Once for a step (no `kind`) it is gathered with the first layer."""
        leaves = self.whole[stage].layers > 2
        if kind is None:
            return portion.first, False
        if kind is Kind.FORWARD:
            again = self.in_passes(stage) or self.layout.plan.defers_wgrad
            return portion.first and again, portion.last and leaves
        return portion.first and leaves, False

    def _each_layer(
        self, portion: Portion, seconds: Callable[[Portion], float], with_tied: tuple[bool, bool]
    ) -> list[float]:
        """Return `seconds` of each layer of a portion, in model order. Equal layers are asked once."""
        tied = self.model.tied_head and self.layout.num_stages == 1 and self.software.one_tied_copy
        one, ends = Portion(1, False, False), portion._replace(first=portion.first and not tied)
        if portion.layers == 1:
            times = [seconds(ends)]
        else:
            middle = seconds(one) if portion.layers > 2 or not (ends.first and ends.last) else 0.0
            times = [middle] * portion.layers
            if ends.first:
                times[0] = seconds(one._replace(first=True))
            if ends.last:
                times[-1] = seconds(one._replace(last=True))
        if tied:
            for at, comes in zip((0, -1), with_tied, strict=True):
                times[at] += comes and seconds(Portion(0, True, False))
        return times
