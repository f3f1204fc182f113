"""The costs of each part of a bound plan, from the costs of layers and links: microbatches, boundaries and the optimizer."""

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from operator import add
from typing import NamedTuple

from hethub.predictor.cost.cache import layer_cost_of, memoized
from hethub.predictor.cost.constants import Constants
from hethub.predictor.cost.layer import LayerCost, PassSeconds
from hethub.predictor.cost.links import Network
from hethub.predictor.cost.profile import ProfileSpec
from hethub.predictor.cost.profiled_layer import ProfiledLayerCost
from hethub.predictor.cost.software import Software, element_bytes
from hethub.predictor.memory.state import optimizer_bytes
from hethub.predictor.pipeline.overlap import Ends, MicrobatchCost, Parts, Round
from hethub.predictor.pipeline.state.costs import Portion, StateCosts
from hethub.predictor.pipeline.traffic.link_loads import LinkLoads, Paces
from hethub.predictor.pipeline.traffic.messages import Messages
from hethub.predictor.pipeline.traffic.routes import Flow, Pair, Routes
from hethub.spec.cluster import ClusterSpec
from hethub.spec.layout.bind import Layout
from hethub.spec.layout.state import brought_elements
from hethub.spec.plan import ReplicaSpec
from hethub.spec.schedule.microbatches import sizes_of


class _Passes(NamedTuple):
    """The seconds of one microbatch's passes through a portion. `forward` and `backward` are compute, `weight` is the part of
    the backward that is put off, `tp_forward` and `tp_backward` are sums inside the replica, `copies` are waits for copies
    to the host and back, and `ends` are the parts of embedding and head in the compute."""

    forward: float
    backward: float
    weight: float
    tp_forward: float
    tp_backward: float
    copies: tuple[float, ...]
    ends: Ends

    @property
    def with_sums(self) -> tuple[float, float]:
        return self.forward + self.tp_forward, self.backward + self.tp_backward

    @property
    def alone(self) -> tuple[float, float, float]:
        """The seconds of each pass that can hide collectives over replicas."""
        forward, backward = map(add, self.with_sums, self.copies)
        return forward, backward - self.weight, self.weight


class PlanCosts:
    """The costs of a layout under one software stack. Equal replicas are priced once."""

    def __init__(
        self,
        layout: Layout,
        software: Software,
        constants: Constants,
        profile: ProfileSpec | None = None,
        *,
        links_of: ClusterSpec | None = None,
        like: "PlanCosts | None" = None,
    ) -> None:
        """`links_of` is the cluster whose links count, by default the layout's. `like` are costs of the same plan under other
        figures of cluster, constants or profile, from which all is taken that does not depend on figures."""
        self.layout, self.software, self.constants, self.profile = layout, software, constants, profile
        self.plan, self.model, self._like = layout.plan, layout.model, like
        self.width = element_bytes(software.math_precision(self.plan.precision))
        self.network = Network(links_of or layout.cluster, constants, profile, layout.plan.unused)
        self.state = StateCosts(layout, software, self.network, self._shortest)
        shared = like.messages if like else None
        self.messages: Messages = Messages(layout, self.network, software, self._activation_bytes(1), shared)
        self._layer_costs: dict[str, LayerCost] = {}
        self._microbatches: dict[tuple[object, ...], MicrobatchCost] = {}
        self._optimizers: dict[tuple[object, ...], float] = {}
        self._beside_rings: dict[int, float] = {}  # seconds of a message's byte, by stage
        self._paces: dict[Pair, tuple[Paces, Paces]] = {}

    def with_figures(self, cluster: ClusterSpec, constants: Constants, profile: ProfileSpec | None) -> "PlanCosts":
        """Return the costs under other figures of cluster, constants and profile. The planner asks seventeen times a plan."""
        return PlanCosts(self.layout.on(cluster), self.software, constants, profile, like=self)

    def layer_cost(self, rank: int) -> LayerCost:
        """Return the layer costs of a rank's accelerator."""
        accelerator = self.layout.cluster.places[rank].accelerator
        found = self._layer_costs.get(accelerator.name)
        if found is None:
            asked = (self.model, accelerator, self.plan.seq_len, self.plan.precision, self.software)
            found = self._layer_costs[accelerator.name] = layer_cost_of(*asked, self.profile, self.constants)
        return found

    @property
    def extrapolated(self) -> bool:
        """Whether a profile was extrapolated beyond what it measured."""
        return any(isinstance(cost, ProfiledLayerCost) and cost.extrapolated for cost in self._layer_costs.values())

    @memoized
    def replica_key(self, stage: int, replica: int) -> tuple[object, ...]:
        """Return what a replica's costs depend on. Replicas with equal keys cost the same."""
        if self._like is not None:
            return self._like.replica_key(stage, replica)
        spec = self.layout.replica(stage, replica)
        places = [self.layout.cluster.places[rank] for rank in spec.ranks]
        names, machines = [place.node.device.name for place in places], [place.machine for place in places]
        node_of = {place.machine: place.node.name for place in places}
        return (
            stage,
            tuple(names if len(set(names)) > 1 else names[:1]),
            tuple([machines.count(machine) for machine in node_of]),
            tuple(node_of.values()) if len(node_of) > 1 else (),  # whose cards and uplinks its sums pass
            spec.uneven_shares,
            self.network.joined(spec.ranks),
            self.state.host_copies.at_once(machines),
            spec.samples if self.state.in_passes(stage) else None,  # which share what goes on beside their passes
        )

    @cached_property
    def microbatches_alike(self) -> bool:
        """Whether all stages divide the samples alike, so that replica r talks only to replica r of the neighbouring stages."""
        return len({sizes_of(stage.replicas) for stage in self.plan.stages}) == 1

    @cached_property
    def chains(self) -> tuple[int, ...]:
        """The first replica of each sort of chain through the stages. It needs stages that divide the samples alike."""
        found: dict[object, int] = {}
        stages = range(self.layout.num_stages)
        named = [stage for stage in self.layout.stages if stage.state_shares]
        for replica, spec in enumerate(self.plan.stages[0].replicas):
            keys = tuple(self.replica_key(stage, replica) for stage in stages)
            levels = tuple(self.boundary_key(stage, replica, replica) for stage in stages[:-1])
            given = tuple(self.layout.replica(stage, replica).in_flight for stage in stages)
            shares = tuple([own.state_shares.get(rank) for own in named for rank in own.replicas[replica].ranks])
            key = (keys, levels, given, shares, spec.micro_batch, spec.samples, self._rounds_of(replica))
            found.setdefault(key, replica)
        return tuple(found.values())

    def _rounds_of(self, replica: int) -> tuple[tuple[int, ...], ...]:
        """Return the rounds in which a replica has a microbatch, for the stages where it has none in some."""
        stages = filter(self.plan.runs_in_rounds, range(self.layout.num_stages))
        some = [stage for stage in stages if not self.layout.joins_every_round(stage, replica)]
        return tuple([tuple(self.layout.round_numbers(stage, replica)) for stage in some])

    @cached_property
    def chains_apart(self) -> bool:
        """Whether chains that differ never wait for each other in the collectives of a round."""
        return len(self.chains) == 1 or not any(map(self.state.in_rounds, range(self.layout.num_stages)))

    def boundary_key(self, stage: int, source: int, target: int) -> tuple[object, ...]:
        """Return what the cost of a message between two replicas depends on, beside its bytes."""
        between = self.messages.key(stage, source, stage + 1, target)
        if not self.is_paced:
            return between
        return (*between, *[self.paces(boundary, source, target) for boundary in self.routes.leaving[stage]])

    def microbatch(
        self, stage: int, replica: int, samples: int, portion: Portion | None = None, rounds: float | None = None
    ) -> MicrobatchCost:
        """Return the seconds of a microbatch of `samples`, forward and backward, through a portion of the stage (by default
        all of it). They are a mean over `rounds` rounds, by default those of the layout."""
        portion, rounds = portion or self.state.whole[stage], rounds or self._rounds(stage, replica)
        key = (self.replica_key(stage, replica), samples, portion, rounds)
        found = self._microbatches.get(key)
        if found is None:
            found = self._microbatches[key] = self._microbatch(stage, replica, samples, portion, rounds)
        return found

    @memoized
    def _rounds(self, stage: int, replica: int) -> int:
        """Return the number of rounds of a replica's actor, which is its number of microbatches if it works alone."""
        return self.layout.loads[stage][self.layout.actor_of(stage, replica)].num_microbatches

    def _shortest(self, stage: int, portion: Portion) -> tuple[float, float]:
        """Return the seconds of a forward and of a backward of the smallest microbatch, one sample, each on the replica that
        is fastest at it."""
        number = len(self.plan.stages[stage].replicas)
        replicas = {self.replica_key(stage, replica): replica for replica in range(number)}
        found = [self.microbatch(stage, replica, 1, portion) for replica in replicas.values()]
        return min(ways.forward.total for ways in found), min(ways.backward.total for ways in found)

    def _microbatch(self, stage: int, replica: int, samples: int, portion: Portion, rounds: float) -> MicrobatchCost:
        spec = self.layout.replica(stage, replica)
        own = self._passes(stage, spec, samples, portion)
        at_once = self.state.at_once(stage, portion, rounds)
        whole = own if at_once == portion else self._passes(stage, spec, samples, at_once)
        messages = self._message_seconds(stage, samples) if rounds > 1 else 0.0  # nobody else's are under way then
        # Collectives go on while a pass waits for its copies.
        shown = self.state.round_seconds(stage, whole.alone, portion, whole.ends, messages, rounds)
        slowed = self.state.slowed_passes(stage, own.with_sums, portion, samples / spec.samples)
        return MicrobatchCost(
            Parts(own.forward, own.tp_forward, shown[0] + slowed[0] + own.copies[0]),
            Parts(own.backward - own.weight, own.tp_backward, shown[1] + slowed[1] + own.copies[1]),
            Parts(own.weight, 0.0, shown[2]),
            Parts(0.0, 0.0, shown[3]),
        )

    @memoized
    def visits(self, stage: int, replica: int, samples: int, portion: Portion) -> Round:
        """Return the layers of a microbatch's passes through a portion. They are replayed one by one."""
        own = self._passes(stage, self.layout.replica(stage, replica), samples, portion)
        return self.state.round(stage, own.alone, portion, own.ends, self._message_seconds(stage, samples))

    def _passes(self, stage: int, spec: ReplicaSpec, samples: int, portion: Portion) -> "_Passes":
        """Return a microbatch's passes through a portion, without the collectives over replicas."""
        fractions = self.state.rings.rank_fractions(spec)
        named = {(self.layer_cost(r).accelerator.name, part): r for r, part in zip(spec.ranks, fractions, strict=True)}
        unlike = [(share, rank) for (_, share), rank in named.items()]
        each = [self._rank_passes(stage, spec, rank, share, samples, portion) for share, rank in unlike]
        forward, backward, weight = map(max, zip(*each, strict=True))
        tp = self._tensor_parallel_seconds(stage, spec, unlike, samples, portion)
        found = _Passes(forward, backward, weight, *tp, (0.0, 0.0), self._ends(unlike, samples, portion))
        if "activations" not in self.layout.stages[stage].offload:
            return found
        copies = (self.state.copying_seconds(stage, spec, samples, portion.layers, each) for each in found.with_sums)
        return found._replace(copies=tuple(copies))

    def _rank_passes(
        self, stage: int, spec: ReplicaSpec, rank: int, fraction: float, samples: int, portion: Portion
    ) -> tuple[float, float, float]:
        """Return the compute seconds of a microbatch on one rank: forward, backward, and the part of the backward that is put
        off."""
        cost, stage_spec = self.layer_cost(rank), self.layout.stages[stage]
        tp = self.state.rings.tensor_parallel(spec)
        layer = cost.layer(samples, tp, stage_spec.recompute, fraction)
        forward, backward = layer.forward * portion.layers, layer.backward * portion.layers
        late = cost.weight_seconds(samples, tp, fraction) if self.plan.defers_wgrad else 0.0
        for end in self._ends([(fraction, rank)], samples, portion):
            forward, backward = forward + end[0], backward + end[1]
        return forward, backward, portion.layers * late

    def _ends(self, unlike: Sequence[tuple[float, int]], samples: int, portion: Portion) -> Ends:
        """Return the seconds of a portion's embedding and head, forward and backward, on the slowest of these ranks."""
        costs = [(self.layer_cost(rank), share) for share, rank in unlike]
        embedding = max(cost.embedding(samples) for cost, _ in costs) if portion.first else PassSeconds(0.0, 0.0)
        head = max(cost.head(samples, share) for cost, share in costs) if portion.last else PassSeconds(0.0, 0.0)
        return embedding, head

    def _activation_bytes(self, samples: float) -> float:
        """Return the bytes of the hidden states of `samples` on one rank."""
        return samples * self.plan.seq_len * self.model.hidden * self.width / self.software.context_parallel

    def _tensor_parallel_seconds(
        self, stage: int, spec: ReplicaSpec, unlike: Sequence[tuple[float, int]], samples: int, portion: Portion
    ) -> tuple[float, float]:
        """Return the seconds that tensor parallelism adds to the forward and to the backward.

        Each layer has two all-reduces in each pass, and two more where the forward runs again. Embedding and head add one
        each to the forward. They add none to the backward: the gradient of the head's input is summed with the loss, and
        that of the embedding is not summed. The loss needs the largest logit of each token, then two sums."""
        tp = self.state.rings.tensor_parallel(spec)
        if tp == 1:
            return 0.0, 0.0
        stage_spec = self.layout.stages[stage]
        group = self.network.group(spec.ranks[:tp])
        all_reduce = partial(self.network.all_reduce, group, sharing=self.network.sharing(group))
        once = all_reduce(self._activation_bytes(samples))
        if self.software.overlapped_tensor_parallel and self.software.sequence_parallel:
            once *= self.network.fit["tensor_parallel_shown"]
        layers, ends = portion.layers, portion.first + portion.last
        again = 2 * layers * once if stage_spec.recompute == "full" else 0.0
        alone = [
            self.layer_cost(rank).layer(samples, tp, stage_spec.recompute, share).backward for share, rank in unlike
        ]
        slowest = max(alone)  # a faster rank has less to do beside its sums, and waits for the slowest in each
        backward = max(
            own - slowest + self._sums_of_backward(stage, rank, tp, share, samples, once)
            for own, (share, rank) in zip(alone, unlike, strict=True)
        )
        forward = (2 * layers + ends) * once
        if portion.last:
            forward += self.software.loss_seconds(
                samples * self.plan.seq_len / self.software.context_parallel, all_reduce
            )
        return forward, layers * backward + again

    def _sums_of_backward(self, stage: int, rank: int, tp: int, share: float, samples: int, once: float) -> float:
        """Return what a layer's two sums add to its backward on a rank. They overlap with gradients of weights, except where
        these are put off, where the cores that compute also do the sums, and in a rehearsal, which paces one after the
        other."""
        apart = self.plan.defers_wgrad or self.layout.cluster.emulated or self.state.by_turns[stage]
        if apart:
            return 2 * once
        cost = self.network.fit["overlap_cost"]
        return self.layer_cost(rank).sums_beside_weights(samples, tp, share, once, cost)

    def optimizer(self, stage: int, replica: int, portion: Portion | None = None) -> float:
        """Return the seconds of the optimizer on a portion, by default all of the stage, on the replica's slowest rank."""
        if not self.software.optimizer_included:
            return 0.0
        stage_spec, spec = self.layout.stages[stage], self.layout.replica(stage, replica)
        shared = tuple(map(stage_spec.state_shares.get, spec.ranks)) if stage_spec.state_shares else ()
        key = (self.replica_key(stage, replica), portion, shared)
        found = self._optimizers.get(key)
        if found is None:
            found = self._optimizers[key] = max(self._update_seconds(stage, spec, rank, portion) for rank in spec.ranks)
        return found

    def _update_seconds(self, stage: int, spec: ReplicaSpec, rank: int, portion: Portion | None) -> float:
        """Return the seconds of the optimizer on one rank, with the copies of offloaded state that overlap with it."""
        own, place = self.state.owned(stage, spec, rank, portion), self.layout.cluster.places[rank]
        moved = optimizer_bytes(self.width) * ("optimizer" in self.layout.stages[stage].offload)
        seconds = self.layer_cost(rank).optimizer(own)
        return self.state.host_copies.beside(place, seconds, moved * own, moved * brought_elements())

    @memoized
    def boundary(self, stage: int, source: int, target: int, samples: int, below: int | None = None) -> float:
        """Return the seconds of a message of `samples` from a replica of `stage` to one of the stage `below`, by default the
        next, or back."""
        return self.messages.seconds(stage, source, target, samples, below)

    def _message_seconds(self, stage: int, samples: int) -> float:
        """Return the seconds for which a pass's messages occupy links that the collectives of its rounds use too."""
        if not self.state.in_rounds(stage):
            return 0.0
        if stage not in self._beside_rings:
            self._beside_rings[stage] = max([0.0, *self._ways_beside_rings(stage)])
        return self._beside_rings[stage] * self._activation_bytes(samples)

    def _ways_beside_rings(self, stage: int) -> Iterator[float]:
        group = self.state.rings.group(stage, 0)
        passed = {resource.kind for resource in self.network.ring_bytes(group, 1.0, "reduce_scatter")} or {"port"}
        for above in range(max(0, stage - 1), min(stage + 1, self.layout.num_stages - 1)):
            last = [len(self.layout.stages[at].replicas) - 1 for at in (above, above + 1)]
            pairs = [[min(own, most) for most in last] for own in range(last[stage - above] + 1)]
            for a, b in {self.messages.key(above, a, above + 1, b): (a, b) for a, b in pairs}.values():
                yield self.messages.seconds_on(passed, above, a, b)

    # -- pace

    @cached_property
    def routes(self) -> Routes:
        """The links that the plan's messages pass. They do not depend on figures."""
        if self._like is not None:
            return self._like.routes
        return Routes(self.layout, self.network, self._activation_bytes(1), self.software)

    @cached_property
    def loads(self) -> LinkLoads:
        """What the plan sends over each link."""
        return LinkLoads(self.routes, self.network, self.state)

    def paces(self, boundary: int, above: int, below: int) -> tuple[Paces, Paces]:
        """Return the least seconds per sample between messages of two replicas, because of links they share: of activations,
        and of their gradients."""
        key = self.routes.alike[boundary, above, below]
        found = self._paces.get(key)
        if found is None:
            (down, up), (boundary, above, below) = self.routes.flows[key], key
            found = self._paces[key] = self._pace(down, boundary, 0, above), self._pace(up, boundary + 1, 1, below)
        return found

    def _pace(self, flow: Flow, chunk: int, way: int, sender: int) -> Paces:
        """Return this pace for one flow of messages from a replica's model chunk. It is 0.0 where the chunk's passes are
        slower anyway."""
        (samples, apart), (one_way, two_way) = self._sent_apart(chunk, way, sender), self.loads.paces(flow)
        return Paces(one_way if one_way * samples > apart else 0.0, two_way if two_way * samples > apart else 0.0)

    @memoized
    def _sent_apart(self, chunk: int, way: int, replica: int) -> tuple[int, float]:
        """Return the samples of a message that a replica sends from a model chunk, and the least seconds between two."""
        giving = self.layout.model_chunks[chunk]
        spec, portions = self.layout.replica(giving.stage, replica), self.state.portions[giving.stage]
        portion = portions[giving.chunk] if len(portions) > 1 else None
        apart = self.microbatch(giving.stage, replica, spec.micro_batch, portion)[way].total
        if short := spec.samples % spec.micro_batch:
            apart = min(apart, self.microbatch(giving.stage, replica, short, portion)[way].total)
        return spec.micro_batch * self.software.interleave, apart

    @cached_property
    def is_paced(self) -> bool:
        """Whether some messages come faster than a link takes them."""
        return any(any(own.two_way for own in self.paces(*key)) for key in self.routes.flows)
