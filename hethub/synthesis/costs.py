"""The seconds of operators and collectives on the ranks of a cluster: the predictor's costs, asked for aten operators."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from math import prod
from typing import Literal, NamedTuple

import numpy as np
import torch

from hethub.predictor.cost.constants import is_cpu, packaged
from hethub.predictor.cost.layer import Device, adamw_bytes
from hethub.predictor.cost.links import Network
from hethub.predictor.cost.operators import Product, Work
from hethub.predictor.cost.software import HETHUB
from hethub.spec.accelerator import AcceleratorSpec, Precision
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput
from hethub.synthesis.graph import Graph, Operator, Tensor, argument_of
from hethub.synthesis.rules import PARTIAL, WHOLE, Cut, Rule, Rules, State
from hethub.synthesis.table import RESHAPES, order_of, short

Shares = tuple[tuple[int, ...], ...]  # per axis, the atoms of each rank
Collective = Literal["all-reduce", "reduce-scatter", "all-gather", "padded all-gather", "all-to-all"]
# Read as much of their first input as they make.
LOOKUPS = ("embedding.default", "gather.default", "index.Tensor", "index_select.default")
# Make what they make of a shape alone.
FILLS = (
    "empty_like.default", "full_like.default", "ones_like.default", "zeros_like.default", "new_full.default", "new_zeros.default",
)  # fmt: skip
# Causal attention leaves out what lies behind the block of keys that a query is in. Measured of PyTorch's kernel: 0.76 of the
# whole time for 1024 keys, 0.64 for 2048, 0.55 to 0.62 for 4096.
KEYS_AT_ONCE = 512
_PRECISIONS: dict[torch.dtype, Precision] = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
}  # fmt: skip


@dataclass(frozen=True)
class Linear:
    """Seconds that grow with a size: `fixed + slope * size`."""

    fixed: float
    slope: float


class Costs:
    """Seconds of a graph's operators on each rank of a cluster, and of collectives among all its ranks."""

    def __init__(self, cluster: ClusterSpec, precision: Precision) -> None:
        self.cluster, self.precision = cluster, precision
        self.accelerators = [place.accelerator for place in cluster.places]
        lacking = next((a for a in self.accelerators if not a.peak_flops(precision)), None)
        if lacking is not None:
            raise BadInput(
                f"{lacking.name} does not compute in {precision}; give the module in a type that every accelerator has."
            )
        self._on_cpu = [is_cpu(accelerator) for accelerator in self.accelerators]
        self.size = cluster.size
        self._network = Network(cluster)
        self._group = self._network.group(range(cluster.size))
        self._operators: dict[Operator, tuple[np.ndarray, np.ndarray]] = {}

    def operator(self, graph: Graph, operator: Operator) -> tuple[np.ndarray, np.ndarray]:
        """Return for each rank the seconds of starting the operator, and the seconds of all its work."""
        if operator not in self._operators:
            self._operators[operator] = self._seconds(graph, operator)
        return self._operators[operator]

    def _seconds(self, graph: Graph, operator: Operator) -> tuple[np.ndarray, np.ndarray]:
        works = {on_cpu: work(graph, operator, write_allocate=on_cpu) for on_cpu in set(self._on_cpu)}
        # Autocast computes products in another type than that of the parameters.
        own = _PRECISIONS.get(graph.tensors[operator.made[0]].dtype, self.precision)
        pairs = [
            _operator_seconds(accelerator, own if accelerator.peak_flops(own) else self.precision, works[on_cpu])
            for accelerator, on_cpu in zip(self.accelerators, self._on_cpu, strict=True)
        ]
        return np.array([start for start, _ in pairs]), np.array([rest for _, rest in pairs])

    def update(self, parameter: Tensor) -> np.ndarray:
        """Return for each rank the seconds of an AdamW step over a whole parameter, from the bytes that the predictor counts."""
        elements = parameter.num_bytes / parameter.dtype.itemsize
        return elements * self._update_seconds

    @cached_property
    def _update_seconds(self) -> np.ndarray:
        """The seconds of AdamW for one element on each rank. All parameters are stepped by few launches, which are not counted."""
        devices = [device_of(accelerator, self.precision) for accelerator in self.accelerators]
        return np.array([adamw_bytes(self.precision) / (d.bandwidth * d.fit.memory) for d in devices])

    @cached_property
    def reduce_scatter(self) -> Linear:
        """The seconds of a reduce-scatter by the bytes of the whole tensor, if ranks have equal pieces. An all-gather takes
        equally long. What CPU ranks send goes through their hosts, on one machine or on several."""
        small, large = 1e6, 1e8
        seconds = [self._network.reduce_scatter(self._group, size) for size in (small, large)]
        slope = max(seconds[1] - seconds[0], 0.0) / (large - small)
        hosted = packaged().links["hosted_latency_seconds"] if all(self._on_cpu) else 0.0
        return Linear(max(seconds[0] - slope * small, hosted), slope)

    def collective(self, kind: Collective, num_bytes: float, smallest: float, largest: float) -> float:
        """Return the seconds of a collective over `num_bytes`. The ranks' pieces are fractions from `smallest` to `largest`.

        The busiest rank counts. It receives all but the smallest piece, where equal pieces leave out 1/n. Padding
        makes every piece as large as the largest and costs one start; without it the pieces start one by one.
        """
        if self.size == 1:
            return 0.0
        ring, equal = self.reduce_scatter, (self.size - 1) / self.size
        if kind == "all-reduce":
            return 2.0 * (ring.fixed + ring.slope * num_bytes)
        if kind == "padded all-gather":
            return ring.fixed + ring.slope * num_bytes * largest * self.size
        if kind == "all-to-all":
            return ring.fixed * 2.0 + ring.slope * num_bytes * largest
        starts = 1.0 if largest - smallest < 1e-9 else 1.5
        return ring.fixed * starts + ring.slope * num_bytes * (1.0 - smallest) / equal


class WithoutLatency(Costs):
    """What HAP's own costs know: nothing takes time to start."""

    def _seconds(self, graph: Graph, operator: Operator) -> tuple[np.ndarray, np.ndarray]:
        start, rest = super()._seconds(graph, operator)
        return start * 0.0, rest

    @cached_property
    def reduce_scatter(self) -> Linear:
        return Linear(0.0, super().reduce_scatter.slope)


def precision_of(graph: Graph) -> Precision:
    """Return the type of most of the parameters' bytes."""
    totals: dict[torch.dtype, int] = {}
    for tensor in graph.parameters.values():
        held = graph.tensors[tensor]
        totals[held.dtype] = totals.get(held.dtype, 0) + held.num_bytes
    widest = max(totals, key=lambda dtype: totals[dtype])
    if widest not in _PRECISIONS:
        raise BadInput(f"the module's parameters are {widest}; hethub computes in {', '.join(map(str, _PRECISIONS))}.")
    return _PRECISIONS[widest]


def is_view(operator: Operator) -> bool:
    """Whether its outputs live in its input's memory: nothing is computed and nothing moves. What has no rule counts as a
    copy, which it is given where its input does not lie in order."""
    return short(operator) in RESHAPES or (operator.target.is_view and order_of(operator) == "any")


def work(graph: Graph, operator: Operator, *, write_allocate: bool = False) -> Work | None:
    """Return what an operator computes and moves as a whole, or None if it only makes a view.

    With `write_allocate` a line of memory is read before it is written, as a CPU's caches do (McCalpin, Memory Bandwidth
    and Machine Balance, 1995, of the STREAM benchmark).
    """
    name = short(operator)
    if is_view(operator) or not operator.inputs:
        return None
    width = graph.tensors[operator.made[0]].dtype.itemsize
    made = sum(graph.tensors[t].num_bytes for t in operator.made)
    allocated = made if write_allocate else 0
    if products := _products(graph, operator):
        return Work.of(products, width, 0.0, 0.0, 1, fused_bytes=float(allocated))
    read = () if name in FILLS else operator.inputs[1:] if name in LOOKUPS else operator.inputs
    moved = sum(graph.tensors[t].num_bytes for t in dict.fromkeys(read)) + made * (2 if name in LOOKUPS else 1)
    return Work.of((), width, 0.0, 0.0, 1, fused_bytes=float(moved + allocated))


def _products(graph: Graph, operator: Operator) -> tuple[Product, ...]:
    """Return the matrix products inside an operator."""
    name, shapes = short(operator), graph.shapes_in(operator)
    if name in ("mm.default", "addmm.default"):
        (rows, inner), (_, columns) = shapes[-2:]
        return (Product(rows, columns, inner),)
    if name in ("bmm.default", "baddbmm.default"):
        (times, rows, inner), (_, _, columns) = shapes[-2:]
        return (Product(rows, columns, inner, times),)
    if name == "mv.default":
        (rows, inner), _ = shapes
        return (Product(rows, 1, inner),)
    if name == "convolution.default":
        return (_convolution(operator, shapes[0], graph.shapes_out(operator)[0], shapes[1]),)
    if name == "convolution_backward.default":
        once = _convolution(operator, shapes[1], shapes[0], shapes[2])
        return (once,) * sum(part is not None for part in operator.outputs[:2])
    if "scaled_dot_product" in name:
        query, key = (shapes[0], shapes[1]) if "backward" not in name else (shapes[1], shapes[2])
        is_causal = argument_of(operator.target, operator.args, operator.kwargs, "is_causal", False)
        seen = (key[2] + min(key[2], KEYS_AT_ONCE)) / 2 if is_causal else key[2]
        scores = Product(query[2], seen, query[3], query[0] * query[1])
        return (scores,) * (5 if "backward" in name else 2)
    return ()


def _convolution(operator: Operator, given: Sequence[int], made: Sequence[int], weight: Sequence[int]) -> Product:
    """Return a convolution as a product. The kernel is applied once for each pixel that is made, or in a transposed one for
    each pixel that is given."""
    pixels = given if argument_of(operator.target, operator.args, operator.kwargs, "transposed") else made
    return Product(prod(pixels) / pixels[1], weight[0], prod(weight[1:]))


@cache
def _operator_seconds(accelerator: AcceleratorSpec, precision: Precision, found: Work | None) -> tuple[float, float]:
    """Return the seconds of starting an operator and of computing it. A device computes while its host launches what comes
    next. A CPU's core does one after the other, and launches views too."""
    launch = packaged().common["launch_seconds"] if is_cpu(accelerator) else 0.0
    if found is None:
        return launch, 0.0
    device = device_of(accelerator, precision)
    start = device.seconds(Work.of((), 0, 0.0, 0.0, 1))
    return launch + start, max(device.seconds(found) - start, 0.0)


@cache
def device_of(accelerator: AcceleratorSpec, precision: Precision) -> Device:
    """Without a CPU's launches, which are added to what it computes, and without waves on its one core: they are what
    the last of a device's many units leave idle."""
    on_cpu = is_cpu(accelerator)
    device = Device(accelerator, precision, replace(HETHUB, captured=on_cpu), packaged())
    if on_cpu:
        device.fit = replace(device.fit, wave_area=0.0)
    return device


# -- what programs pay --------------------------------------------------------------------------------------------


class Move(NamedTuple):
    """A tensor brought from one state into another; no collective where every rank has what it needs."""

    tensor: int
    source: State
    target: State
    collective: Collective | None


class Model(NamedTuple):
    """What programs are about: the traced step, its rules, and what everything costs."""

    graph: Graph
    rules: Rules
    costs: Costs


def fractions(model: Model, shares: Shares, tensor: int, state: State) -> np.ndarray:
    """Return which fraction of a tensor each rank holds in `state`."""
    if not isinstance(state, Cut):
        return _all(model.costs.size)
    return _parts(shares[model.rules.axis(tensor, state)])


def held_bytes(model: Model, shares: Shares, tensor: int, state: State) -> np.ndarray:
    """Return the bytes that each rank holds of a tensor in `state`."""
    return model.graph.tensors[tensor].num_bytes * fractions(model, shares, tensor, state)


@lru_cache(maxsize=4096)
def _parts(own: tuple[int, ...]) -> np.ndarray:
    """Return the fractions that ranks have of an axis, from their numbers of atoms."""
    return np.array(own, dtype=float) / sum(own)


@cache
def _all(size: int) -> np.ndarray:
    return np.ones(size)


def rank_seconds(model: Model, shares: Shares, number: int, rule: Rule) -> np.ndarray:
    """Return the seconds of an operator under a rule on each rank."""
    start, rest = model.costs.operator(model.graph, model.graph.operators[number])
    axis = model.rules.axis_of(number, rule)
    if axis is None:
        return start + rest
    part = _parts(shares[axis])
    return (start + rest * part) * (part > 0)


def rule_seconds(model: Model, shares: Shares, number: int, rule: Rule) -> float:
    """Return the seconds of an operator under a rule on the slowest rank."""
    return float(rank_seconds(model, shares, number, rule).max())


def update_seconds(model: Model, shares: Shares, tensor: int, state: State) -> float:
    """Return the seconds of the optimizer's update of a parameter kept in `state`, on the slowest rank."""
    whole = model.costs.update(model.graph.tensors[tensor])
    return float((whole * fractions(model, shares, tensor, state)).max())


def move_cost(
    model: Model, shares: Shares, tensor: int, source: State, target: State
) -> tuple[float, Collective | None]:
    """Return the seconds in which a tensor is brought from one state into another, and the best collective for it."""
    if source in (target, WHOLE):
        return 0.0, None
    size = model.graph.tensors[tensor].num_bytes
    costs = model.costs

    def seconds(kind: Collective, state: State) -> tuple[float, Collective]:
        own = shares[model.rules.axis(tensor, state)] if isinstance(state, Cut) else (1,)
        return costs.collective(kind, size, min(own) / sum(own), max(own) / sum(own)), kind

    if source == PARTIAL:
        return seconds("all-reduce", WHOLE) if target == WHOLE else seconds("reduce-scatter", target)
    if target == WHOLE:
        return min(seconds("all-gather", source), seconds("padded all-gather", source))
    if target == PARTIAL:
        return 0.0, None  # every rank puts its piece among zeros
    if not is_all_to_all(source, target):
        return float("inf"), None
    return max(seconds("all-to-all", state) for state in (source, target))


def is_all_to_all(source: State, target: State) -> bool:
    """Whether pieces of one cut can be exchanged for pieces of the other: they are cut along unlike dimensions."""
    return isinstance(source, Cut) and isinstance(target, Cut) and source.dim != target.dim


def moves_to(
    model: Model, shares: Shares, tensor: int, source: State, targets: Sequence[State]
) -> tuple[float, list[Move]]:
    """Return the cheapest moves that bring a tensor from the state in which it is made into all of `targets`."""

    def direct(to: Sequence[State]) -> tuple[float, list[Move]]:
        priced = [(move_cost(model, shares, tensor, source, target), target) for target in to if target != source]
        return sum(cost for (cost, _), _ in priced), [Move(tensor, source, to, kind) for (_, kind), to in priced]

    others = [target for target in targets if target != WHOLE]
    through, gathered = direct([WHOLE])
    if source != WHOLE and WHOLE not in targets:
        alone, moves = direct(others)
        if alone <= through:
            return alone, moves
    return through, gathered + [Move(tensor, WHOLE, to, None) for to in others if to != source]
