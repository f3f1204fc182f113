"""What each part of a bound plan costs: tiles, boundaries, reductions and the optimizer, from layer and link costs."""

from collections import Counter
from functools import cached_property
from typing import NamedTuple

from hethub.predictor.constants import Constants
from hethub.predictor.layer_cost import LayerCost
from hethub.predictor.links import Group, Network
from hethub.predictor.profile import ProfileSpec
from hethub.predictor.profiled import ProfiledLayerCost
from hethub.predictor.software import Software, element_bytes
from hethub.spec.layout import Layout
from hethub.spec.plan import ReplicaSpec

BUCKET_BYTES = 16 * 2**20  # of fp32 gradients; the last one cannot overlap with any backward


class Parts(NamedTuple):
    """Seconds of one pass of one tile by what they are spent on."""

    compute: float
    tp: float
    dp: float  # gathers and reductions inside the pass (ZeRO-2/3) that compute does not hide

    @property
    def total(self) -> float:
        return self.compute + self.tp + self.dp


class TileCost(NamedTuple):
    """Forward and backward of one tile on one replica."""

    forward: Parts
    backward: Parts


class Reduction(NamedTuple):
    """A stage's gradients summed over replicas: all of it, what no backward can hide, and new weights sent back."""

    seconds: float
    tail_seconds: float
    gather_seconds: float


class PlanCosts:
    """Costs of a layout under one software stack. Equal replicas are computed once."""

    def __init__(
        self, layout: Layout, software: Software, constants: Constants, profile: ProfileSpec | None = None
    ) -> None:
        self.layout, self.software, self.profile = layout, software, profile
        self.plan, self.model = layout.plan, layout.model
        self._kinds: dict[tuple[int, int], tuple[object, ...]] = {}
        self._shared_exits: dict[int, Counter[int]] = {}
        self.set_constants(constants)
        self.width = element_bytes(software.math_precision(self.plan.precision))

    def set_constants(self, constants: Constants) -> None:
        """Prices everything anew; what depends on the layout alone is kept (the fit asks thousands of times)."""
        self.constants = constants
        self.network = Network(self.layout.cluster, constants, self.profile)
        self._layer_costs: dict[str, LayerCost] = {}
        self._tiles: dict[tuple[object, ...], TileCost] = {}
        self._parameters: dict[tuple[object, ...], float] = {}
        self._optimizers: dict[tuple[object, ...], float] = {}

    def layer_cost(self, rank: int) -> LayerCost:
        """The layer costs of a rank's accelerator."""
        accelerator = self.layout.cluster.places[rank].accelerator
        found = self._layer_costs.get(accelerator.name)
        if found is None:
            args = (self.model, accelerator, self.plan.seq_len, self.plan.precision, self.software, self.constants)
            measured = self.profile.device(accelerator.name, self.plan.precision) if self.profile else None
            found = LayerCost(*args) if measured is None else ProfiledLayerCost(*args).use(measured)
            self._layer_costs[accelerator.name] = found
        return found

    @property
    def extrapolated(self) -> bool:
        """Whether a profile was asked beyond what it measured."""
        return any(isinstance(cost, ProfiledLayerCost) and cost.extrapolated for cost in self._layer_costs.values())

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

    def kind(self, stage: int, replica: int) -> tuple[object, ...]:
        """What a replica's costs depend on: equal kinds cost the same."""
        found = self._kinds.get((stage, replica))
        if found is None:
            spec = self.layout.replica(stage, replica)
            places = [self.layout.cluster.places[rank] for rank in spec.ranks]
            names = tuple(place.accelerator.name for place in places)
            spread = tuple(Counter(place.machine for place in places).values())
            found = self._kinds[stage, replica] = (
                stage,
                names if len(set(names)) > 1 else names[:1],
                spread,
                spec.tensor_shares,
            )
        return found

    @cached_property
    def tiles_alike(self) -> bool:
        """Whether all stages tile the samples alike, so that replica r talks only to replica r of its neighbours."""
        first = [(r.micro_batch, r.samples) for r in self.plan.stages[0].replicas]
        return all([(r.micro_batch, r.samples) for r in stage.replicas] == first for stage in self.plan.stages[1:])

    @cached_property
    def chains(self) -> tuple[int, ...]:
        """Where all stages tile alike: the first replica of every kind of chain through the stages."""
        found: dict[object, int] = {}
        stages = range(self.layout.num_stages)
        for replica, spec in enumerate(self.plan.stages[0].replicas):
            kinds = tuple(self.kind(stage, replica) for stage in stages)
            levels = tuple(self.crossing(stage, replica, replica) for stage in stages[:-1])
            given = tuple(self.layout.replica(stage, replica).in_flight for stage in stages)
            found.setdefault((kinds, levels, given, spec.micro_batch, spec.samples), replica)
        return tuple(found.values())

    def crossing(self, stage: int, source: int, target: int) -> tuple[object, ...]:
        """What the cost of a boundary between two replicas depends on, beside its bytes."""
        places = self.layout.cluster.places
        a, b = (
            places[self.layout.replica(stage, source).ranks[0]],
            places[self.layout.replica(stage + 1, target).ranks[0]],
        )
        return (a.machine == b.machine, a.node.name, b.node.name, self._exits(stage)[a.machine])

    def tile(self, stage: int, replica: int, samples: int) -> TileCost:
        """Seconds of forward and backward of a tile of `samples`, all layers of the stage, embedding and head included."""
        key = (self.kind(stage, replica), samples)
        found = self._tiles.get(key)
        if found is None:
            found = self._tiles[key] = self._tile(stage, replica, samples)
        return found

    def _tile(self, stage: int, replica: int, samples: int) -> TileCost:
        spec = self.layout.replica(stage, replica)
        fractions = self.rank_fractions(spec)
        unlike = {
            (self.layer_cost(rank).accelerator.name, fraction): rank
            for rank, fraction in zip(spec.ranks, fractions, strict=True)
        }
        passes = [self._rank_passes(stage, spec, rank, fraction, samples) for (_, fraction), rank in unlike.items()]
        forward, backward = max(p[0] for p in passes), max(p[1] for p in passes)
        tp_forward, tp_backward = self._tensor_parallel_seconds(stage, spec, samples)
        dp_forward, dp_backward = self._sharded_weight_seconds(
            stage, spec, (forward + tp_forward, backward + tp_backward)
        )
        return TileCost(Parts(forward, tp_forward, dp_forward), Parts(backward, tp_backward, dp_backward))

    def _rank_passes(
        self, stage: int, spec: ReplicaSpec, rank: int, fraction: float, samples: int
    ) -> tuple[float, float]:
        """Forward and backward compute seconds of a tile on one rank."""
        cost, stage_spec = self.layer_cost(rank), self.layout.stages[stage]
        layer = cost.layer(samples, self.tensor_parallel(spec), stage_spec.recompute, fraction)
        forward, backward = layer.forward * stage_spec.num_layers, layer.backward * stage_spec.num_layers
        if stage == 0:
            embedding = cost.embedding(samples)
            forward, backward = forward + embedding.forward, backward + embedding.backward
        if stage == self.layout.num_stages - 1:
            head = cost.head(samples, fraction)
            forward, backward = forward + head.forward, backward + head.backward
        return forward, backward

    def _activation_bytes(self, samples: float) -> float:
        """Bytes of the hidden states of `samples` on one rank."""
        return samples * self.plan.seq_len * self.model.hidden * self.width / self.software.context_parallel

    def _tensor_parallel_seconds(self, stage: int, spec: ReplicaSpec, samples: int) -> tuple[float, float]:
        """Two all-reduces per layer and pass, two more where the forward runs again; embedding and loss add one each."""
        tp = self.tensor_parallel(spec)
        if tp == 1:
            return 0.0, 0.0
        stage_spec = self.layout.stages[stage]
        group = self.network.group(spec.ranks[:tp])
        once = self.network.all_reduce(group, self._activation_bytes(samples), self._groups_per_machine(group))
        layers = stage_spec.num_layers
        ends = (stage == 0) + (stage == self.layout.num_stages - 1)
        again = 2 * layers if stage_spec.recompute == "full" else 0
        return (2 * layers + ends) * once, (2 * layers + ends + again) * once

    def _groups_per_machine(self, group: Group) -> int:
        """How many groups like this one share a machine's interfaces, if all its accelerators are in one."""
        machine = group.machines[0][0]
        return max(1, self.network.machines[machine].accelerators // group.most_per_machine)

    def _sharded_weight_seconds(
        self, stage: int, spec: ReplicaSpec, passes: tuple[float, float]
    ) -> tuple[float, float]:
        """What ZeRO-2/3 adds to a forward and a backward beyond what their compute hides."""
        stage_spec = self.layout.stages[stage]
        if stage_spec.zero < 2 or len(stage_spec.replicas) == 1:
            return 0.0, 0.0
        group = self.replica_group(stage, 0)
        parameters = self.rank_parameters(stage, spec)
        sharing = self._groups_per_machine(group)
        gather = self.network.all_gather(group, parameters * self.width, sharing) if stage_spec.zero == 3 else 0.0
        reduce = self.network.reduce_scatter(group, parameters * self.gradient_wire_bytes, sharing)
        layers = stage_spec.num_layers
        forward, backward = passes
        return _exposed(gather, forward, layers), _exposed(gather + reduce, backward, layers)

    @property
    def gradient_wire_bytes(self) -> int:
        """Bytes of one gradient on the wire: accumulated and reduced in fp32 at least (design rule 11)."""
        return self.software.gradient_wire_bytes or max(4, self.width)

    def replica_group(self, stage: int, position: int) -> Group:
        """The ranks at one position of every replica: who sums one shard's gradients."""
        replicas = self.layout.stages[stage].replicas
        return self.network.group([replica.ranks[min(position, replica.tp - 1)] for replica in replicas])

    def rank_parameters(self, stage: int, spec: ReplicaSpec) -> float:
        """Parameters on the replica's fullest rank."""
        key = (stage, spec.tp, spec.tensor_shares)
        found = self._parameters.get(key)
        if found is None:
            found = self._parameters[key] = self._count_parameters(stage, spec)
        return found

    def _count_parameters(self, stage: int, spec: ReplicaSpec) -> float:
        model, stage_spec = self.model, self.layout.stages[stage]
        fraction = max(self.rank_fractions(spec))
        count = float(stage_spec.num_layers * model.layer_parameters)
        if stage == 0:
            count += model.embedding_parameters
        if stage == self.layout.num_stages - 1:
            count += model.head_parameters
            if self.layout.head_is_apart:
                count += model.vocab * model.hidden
        return count * fraction

    def reduction(self, stage: int) -> Reduction:
        """Seconds to sum a stage's gradients over its replicas, and to send new weights back (ZeRO-1 and 2)."""
        stage_spec = self.layout.stages[stage]
        if len(stage_spec.replicas) * self.software.context_parallel == 1:
            return Reduction(0.0, 0.0, 0.0)
        parameters = max(self.rank_parameters(stage, replica) for replica in stage_spec.replicas)
        group = self.replica_group(stage, 0)
        sharing = self._groups_per_machine(group)
        num_bytes = parameters * self.gradient_wire_bytes
        tail = min(1.0, BUCKET_BYTES / num_bytes) if self.software.overlapped_reduction else 1.0
        if stage_spec.zero == 0:
            seconds = self.network.all_reduce(group, num_bytes, sharing)
            return Reduction(seconds, seconds * tail, 0.0)
        gather = self.network.all_gather(group, parameters * self.width, sharing)
        if stage_spec.zero == 1:
            seconds = self.network.reduce_scatter(group, num_bytes, sharing)
            return Reduction(seconds, seconds * tail, gather)
        return Reduction(0.0, 0.0, gather if stage_spec.zero == 2 else 0.0)

    def optimizer(self, stage: int, replica: int) -> float:
        """Seconds of the optimizer on the replica's slowest rank."""
        if not self.software.optimizer_included:
            return 0.0
        key = self.kind(stage, replica)
        found = self._optimizers.get(key)
        if found is None:
            stage_spec, spec = self.layout.stages[stage], self.layout.replica(stage, replica)
            owned = self.rank_parameters(stage, spec)
            if stage_spec.zero:
                owned /= len(stage_spec.replicas) * self.software.context_parallel
            found = self._optimizers[key] = self.layer_cost(spec.ranks[0]).optimizer(owned)
        return found

    def boundary(self, stage: int, source: int, target: int, samples: int) -> float:
        """Seconds for `samples` from a replica of `stage` to one of the next: the leaders' link, then inside the target."""
        sender, receiver = self.layout.replica(stage, source), self.layout.replica(stage + 1, target)
        num_bytes = self._activation_bytes(samples)
        sharing = self._exits(stage)[self.layout.cluster.places[sender.ranks[0]].machine]
        seconds = self.network.link(sender.ranks[0], receiver.ranks[0], sharing).seconds(num_bytes)
        if receiver.tp > 1:
            seconds += self.network.link(receiver.ranks[0], receiver.ranks[1]).seconds(num_bytes)
        return seconds

    def _exits(self, stage: int) -> Counter[int]:
        """Per machine, how many replicas of the stage send from it."""
        found = self._shared_exits.get(stage)
        if found is None:
            places = self.layout.cluster.places
            found = self._shared_exits[stage] = Counter(
                places[replica.ranks[0]].machine for replica in self.layout.stages[stage].replicas
            )
        return found


def _exposed(communication: float, compute: float, layers: int) -> float:
    """What stays visible of communication that runs one layer ahead of compute: the first layer's, and any excess."""
    return max(0.0, communication - compute * (layers - 1) / layers) if layers > 1 else communication
