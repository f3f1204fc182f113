"""Seconds of a plan's step by textbook formulas alone: a judge that neither hethub's planner nor its peers are made for.

Reads a bound plan (`hethub.spec.layout`) and nothing of `hethub.predictor`. What it takes, for every plan alike:

- Compute: a forward of a layer takes 2 FLOPs for each parameter and token and 2 x sequence x width of attention (causal,
  so half of all pairs), a backward twice as many (Kaplan et al. 2020, section 2.1); full recompute one forward more,
  selective recompute attention's (Korthikanti et al. 2022); the head as a product of hidden x vocabulary. Every
  accelerator reaches UTILISATION of its data sheet's peak in the plan's precision, at every size.
- Tensor parallelism: four all-reduces of a micro-batch's hidden states a layer, six with full recompute (Megatron-LM,
  Shoeybi et al. 2019, section 3), nothing beside them.
- Pipeline: a stage that is busy for B seconds, each of the others taking t for one of its micro-batches, ends a step after
  B + sum of t; the largest over all stages. With equal replicas that is sum of t + (micro-batches - 1) x the slowest stage
  (GPipe, PipeDream-flush). Of that fill `zero_bubble` leaves a third (ZB-H1, Qi et al. 2023, section 2.1), v chunks of
  layers a v-th (Narayanan et al. 2021, section 2.2; Lamy-Poirier 2022 for `ministages`) where the micro-batches suffice
  to go round; stages of `layered` follow each other. Replicas that go in rounds wait for the slowest of each.
- Messages at stage borders: two of the first micro-batch (there and back) in the fill; all others go beside compute, but a
  machine's network cards and the link between two regions are busy for all their bytes, like a stage.
- Data parallelism: 2 (n-1)/n x a stage's weights in the plan's precision, over its slowest link, at ZeRO 0 and 1; at ZeRO 2
  one of the halves once a round, at ZeRO 3 three halves a round (Rajbhandari et al. 2020, section 7), once a step under
  `layered` and `ministages`. Sums go beside the last backward, of which the first layer's has nothing beside it (PyTorch
  DDP, Li et al. 2020); gathers and sums of rounds beside forward and backward, the longer of both counting (FSDP, Zhao et
  al. 2023). A ring between machines fills their cards once, whatever the tensor-parallel degree.
- Host memory: PCIe's nominal rate of 16 lanes. Offloaded activations, 34 bytes x tokens x hidden a layer in 16 bit
  (Korthikanti et al.), and weights go beside compute; 12 bytes of optimizer state a parameter have nothing beside them.

Left out, for every plan alike: latency, the update's own time, launches, uneven shares of state.

`step` takes other parts of the data sheets' figures as well (`Rates`), which tells of two plans whether they differ by the
rates of what they run on or by more.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import NamedTuple

from hethub.spec.cluster import ClusterSpec, Place
from hethub.spec.errors import BadInput
from hethub.spec.layout.bind import Layout
from hethub.spec.plan import ReplicaSpec

UTILISATION = 0.5  # of a data sheet's dense peak
WIDTH = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}  # bytes of an element
KEPT = 34 / 2  # elements that a layer keeps of each element of its input
STATE_BYTES = 12  # of optimizer state a parameter: master weight and two moments
ZB_H1 = 1 / 3  # of 1F1B's bubble


class Rates(NamedTuple):
    """What is reached of the data sheets' figures."""

    compute: Mapping[str, float] = {}  # by accelerator, of its peak in the plan's precision; else UTILISATION
    in_node: Mapping[str, float] = {}  # by node, of its accelerators' links; else all
    cards: float = 1.0  # of a machine's network cards


SHEETS = Rates()


class Stage(NamedTuple):
    """Seconds of a stage: of one micro-batch of its slowest replica, of a step's compute, and of what follows the last
    backward and has nothing beside it."""

    microbatch: float
    busy: float
    behind: float


class Step(NamedTuple):
    """Seconds of a step: of the pipeline's compute with its fill and first messages, of the busiest link with the fill, and
    of what follows the pipeline."""

    pipeline: float
    links: float
    behind: float

    @property
    def seconds(self) -> float:
        return max(self.pipeline, self.links) + self.behind


def step(layout: Layout, rates: Rates = SHEETS) -> Step:
    """The plan's step. Raises BadInput where the cluster does not say how fast a link is that is needed."""
    plan = layout.plan
    stages = [_stage(layout, index, rates) for index in range(layout.num_stages)]
    if plan.schedule == "layered":
        compute = sum(stage.busy for stage in stages)
    else:
        left = ZB_H1 if plan.schedule == "zero_bubble" else 1.0
        lap = sum(stage.microbatch for stage in stages) / plan.num_chunks
        compute = 0.0
        for stage in stages:
            chunk, others = stage.busy / plan.num_chunks, lap - stage.microbatch / plan.num_chunks
            compute = max(compute, (plan.num_chunks - 1) * max(chunk, lap) + chunk + left * others)
    first, links = _messages(layout, rates)
    fill = sum(stage.microbatch for stage in stages) / plan.num_chunks
    return Step(compute + first, links + fill if links else 0.0, max(stage.behind for stage in stages))


def link_bytes_per_second(cluster: ClusterSpec, ranks: Collection[int], rates: Rates = SHEETS) -> float:
    """The slowest link of a ring through some ranks, each way: inside their machines, and of these machines' network
    cards. Raises BadInput where the cluster does not say."""
    places = [cluster.places[rank] for rank in ranks]
    first_of = {place.machine: place for place in places}
    found = []
    if len(first_of) < len(places):
        given = cluster.links.in_node.gbytes_per_second
        found += [
            (given or place.accelerator.link_gbytes_per_second) * 1e9 * rates.in_node.get(place.node.name, 1.0)
            for place in places
        ]
    if len(first_of) > 1:
        bridged = len({place.island for place in places}) > 1
        found += [_card(cluster, place, rates, bridged=bridged) for place in first_of.values()]
    regions = cluster.links.regions
    if regions is not None:
        there = {regions.names.index(regions.of_node[place.node.name]) for place in first_of.values()}
        found += [regions.gbps[a][b] * 1e9 / 8 for a in there for b in there if a != b]
    return min(found)


def _card(cluster: ClusterSpec, place: Place, rates: Rates, *, bridged: bool) -> float:
    """Bytes per second of a machine's network cards."""
    gbps = (bridged and cluster.links.between_islands.gbps_per_node) or place.node.gbps
    if not gbps:
        raise BadInput(f"cluster '{cluster.name}': node '{place.node.name}' has no gbps_per_nic.")
    return gbps * 1e9 / 8 * rates.cards


def _stage(layout: Layout, index: int, rates: Rates) -> Stage:
    plan, spec, model = layout.plan, layout.stages[index], layout.model
    first, last = index == 0, index == layout.num_stages - 1
    width, ranks = WIDTH[plan.precision], len(spec.replicas)
    parameters = spec.num_layers * model.layer_parameters
    parameters += first * model.embedding_parameters + last * model.head_parameters
    least = min(replica.tp for replica in spec.replicas)
    inside = len({layout.cluster.places[rank].machine for rank in spec.ranks}) == 1
    half = 0.0  # of an all-reduce of the stage's weights
    if ranks > 1:
        held = parameters * width / (least if inside else 1)
        half = (ranks - 1) / ranks * held / link_bytes_per_second(layout.cluster, spec.ranks, rates)
    rounds = plan.runs_in_rounds(index)
    gather = half if spec.zero == 3 else 0.0
    scatter = half if spec.zero >= 2 else 0.0
    beside = (gather, gather + scatter) if rounds else (0.0, 0.0)
    each = [_microbatch(layout, index, replica, beside, parameters, rates) for replica in spec.replicas]
    slowest = max(sum(passes) for passes in each)
    if rounds:
        busy = slowest * max(-(-replica.samples // replica.micro_batch) for replica in spec.replicas)
    else:
        pairs = zip(each, spec.replicas, strict=True)
        busy = max(sum(passes) * replica.samples / replica.micro_batch for passes, replica in pairs)
        if spec.zero >= 2:
            busy = max(busy, 2 * gather + scatter)
    summed = {0: 2 * half, 1: 2 * half, 2: half if rounds else 2 * half, 3: scatter}[spec.zero]
    # Of ZeRO 2 and 3 all but the last layer's went beside compute above.
    hidden = max(0.0, summed - max(backward for _, backward in each)) if spec.zero <= 1 else 0.0
    apart = summed / spec.num_layers
    behind = apart + hidden * (1 - 1 / spec.num_layers)
    if "optimizer" in spec.offload:
        owned = parameters / least / (ranks if spec.zero else 1)
        behind += STATE_BYTES * owned / min(_host(layout.cluster.places[rank]) for rank in spec.ranks)
    return Stage(slowest, busy, behind)


def _microbatch(
    layout: Layout, index: int, replica: ReplicaSpec, beside: tuple[float, float], parameters: int, rates: Rates
) -> tuple[float, float]:
    """Seconds of a forward and a backward of one micro-batch; no less than what goes beside them."""
    plan, spec, model = layout.plan, layout.stages[index], layout.model
    tokens, width = replica.micro_batch * plan.seq_len, WIDTH[plan.precision]
    attention = 2 * plan.seq_len * model.heads * model.head_size * tokens * spec.num_layers
    layers = 2 * model.layer_parameters * tokens * spec.num_layers + attention
    head = 2 * model.vocab * model.hidden * tokens if index == layout.num_stages - 1 else 0
    again = {"none": 0, "selective": attention, "full": layers}[spec.recompute]
    shares = replica.tensor_shares or (1.0,) * replica.tp
    places = [layout.cluster.places[rank] for rank in replica.ranks]
    reached = [
        rates.compute.get(place.accelerator.name, UTILISATION) * place.accelerator.peak_flops(plan.precision)
        for place in places
    ]
    per_flop = max(share / sum(shares) / flops for share, flops in zip(shares, reached, strict=True))
    hidden_bytes = tokens * model.hidden * width
    summed = 0.0  # by one all-reduce of each layer
    if replica.tp > 1:
        ring = 2 * (replica.tp - 1) / replica.tp * hidden_bytes
        summed = spec.num_layers * ring / link_bytes_per_second(layout.cluster, replica.ranks, rates)
    forward = per_flop * (layers + head) + 2 * summed
    backward = per_flop * (2 * (layers + head) + again) + (4 if spec.recompute == "full" else 2) * summed
    moved, host = 0.0, min(map(_host, places))  # either way
    if "activations" in spec.offload:
        kept = 1.0 if spec.recompute == "full" else KEPT
        moved += spec.num_layers * kept * hidden_bytes / replica.tp / host
    if "parameters" in spec.offload and not plan.goes_chunk_by_chunk:
        moved += parameters * width / replica.tp / host
    return max(forward, moved, beside[0]), max(backward, moved, beside[1])


def _host(place: Place) -> float:
    """Bytes per second between an accelerator and its host, each way."""
    return 2.0 ** ((place.accelerator.pcie_generation or 5) - 3) * 16e9


def _messages(layout: Layout, rates: Rates) -> tuple[float, float]:
    """Seconds of a first micro-batch's messages through all stages and back, and of the busiest card or region's link for
    all of a step."""
    plan, cluster, regions = layout.plan, layout.cluster, layout.cluster.links.regions
    sample_bytes = plan.seq_len * layout.model.hidden * WIDTH[plan.precision]
    first, busy = 0.0, defaultdict[object, float](float)
    for boundary in layout.boundaries:
        slowest = 0.0
        for transfer in boundary.transfers:
            ends = [layout.leader(transfer.source), layout.leader(transfer.target)]
            num_bytes = transfer.samples.size * sample_bytes
            slowest = max(slowest, num_bytes / link_bytes_per_second(cluster, ends, rates))
            places = [cluster.places[rank] for rank in ends]
            if places[0].machine != places[1].machine:
                bridged = places[0].island != places[1].island
                for place in places:  # one way of a machine carries activations, the other way gradients
                    busy[place.machine] += num_bytes / _card(cluster, place, rates, bridged=bridged)
                if regions is not None:
                    a, b = sorted(regions.names.index(regions.of_node[place.node.name]) for place in places)
                    busy[a, b, "regions"] += (a != b) * num_bytes / (regions.gbps[a][b] * 1e9 / 8)
        first += 2 * slowest
    return first / plan.num_chunks, max(busy.values(), default=0.0)
