"""What operators and collectives take on the ranks of a cluster: the predictor's figures, asked for aten operators."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from typing import Literal

import numpy as np
import torch

from hethub.predictor.cost.constants import packaged
from hethub.predictor.cost.layer import Device, adamw_bytes
from hethub.predictor.cost.links import Network
from hethub.predictor.cost.operators import Product, Work
from hethub.predictor.cost.software import HETHUB
from hethub.spec.accelerator import AcceleratorSpec, Precision
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput
from hethub.synthesis.graph import Graph, Operator, Tensor
from hethub.synthesis.table import RESHAPES, short

Collective = Literal["all-reduce", "reduce-scatter", "all-gather", "padded all-gather", "all-to-all"]
# Views: nothing is computed and nothing moves.
VIEWS = (
    *RESHAPES, "t.default", "transpose.int", "permute.default", "expand.default", "select.int", "squeeze.dim",
    "squeeze.dims", "unsqueeze.default", "slice.Tensor", "split.Tensor", "split_with_sizes.default",
)  # fmt: skip
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
        self._network = Network(cluster)
        self._group = self._network.group(range(cluster.size))

    @property
    def size(self) -> int:
        return self.cluster.size

    @cached_property
    def memory_limits(self) -> list[int]:
        """Bytes of each rank that a program may use."""
        return memory_limits(self.cluster)

    def operator(self, graph: Graph, operator: Operator) -> tuple[np.ndarray, np.ndarray]:
        """Per rank: seconds of starting the whole operator, and seconds that its whole work takes beside."""
        found = work(graph, operator)
        if found is None:
            return np.zeros(self.size), np.zeros(self.size)
        pairs = [_operator_seconds(accelerator, self.precision, found) for accelerator in self.accelerators]
        return np.array([start for start, _ in pairs]), np.array([rest for _, rest in pairs])

    def update(self, parameter: Tensor) -> np.ndarray:
        """Per rank: seconds of an AdamW step over a whole parameter, in the bytes that the predictor counts for one."""
        elements = parameter.num_bytes / parameter.dtype.itemsize
        return elements * self._update_seconds

    @cached_property
    def _update_seconds(self) -> np.ndarray:
        """Per rank: of one element; all parameters are stepped by few launches, which do not count."""
        devices = [_device(accelerator, self.precision) for accelerator in self.accelerators]
        return np.array([adamw_bytes(self.precision) / (d.bandwidth * d.fit.memory) for d in devices])

    @cached_property
    def reduce_scatter(self) -> Linear:
        """By the bytes of the whole tensor, where ranks have equal pieces; an all-gather takes as long."""
        small, large = 1e6, 1e8
        seconds = [self._network.reduce_scatter(self._group, size) for size in (small, large)]
        slope = max(seconds[1] - seconds[0], 0.0) / (large - small)
        return Linear(max(seconds[0] - slope * small, 0.0), slope)

    def collective(self, kind: Collective, num_bytes: float, shares: Sequence[float]) -> float:
        """Seconds of a collective over `num_bytes`, of which rank i's piece is the fraction `shares[i]`.

        The busiest rank counts. It receives all but the smallest piece, where equal pieces leave out 1/n. Padding
        makes every piece as large as the largest and costs one start; without it the pieces start one by one.
        """
        if self.size == 1:
            return 0.0
        ring, equal = self.reduce_scatter, (self.size - 1) / self.size
        uneven = (1.0 - min(shares)) / equal
        if kind == "all-reduce":
            return 2.0 * (ring.fixed + ring.slope * num_bytes)
        if kind == "padded all-gather":
            return ring.fixed + ring.slope * num_bytes * max(shares) * self.size
        if kind == "all-to-all":
            return ring.fixed * 2.0 + ring.slope * num_bytes * max(shares)
        is_even = max(shares) - min(shares) < 1e-9
        return ring.fixed * (1.0 if is_even else 1.5) + ring.slope * num_bytes * uneven


class WithoutLatency(Costs):
    """What HAP's own costs know: nothing takes time to start."""

    def operator(self, graph: Graph, operator: Operator) -> tuple[np.ndarray, np.ndarray]:
        start, rest = super().operator(graph, operator)
        return start * 0.0, rest

    @cached_property
    def reduce_scatter(self) -> Linear:
        return Linear(0.0, super().reduce_scatter.slope)


def memory_limits(cluster: ClusterSpec, reserve: float = 0.0) -> list[int]:
    """Bytes of each rank that a program may use where the fraction `reserve` of the memory stays free."""
    places = cluster.places
    return [int(p.accelerator.memory_bytes * (1.0 - reserve) - p.node.reserved_memory_gb * 2**30) for p in places]


def precision_of(graph: Graph) -> Precision:
    """The type of most parameter bytes."""
    totals: dict[torch.dtype, int] = {}
    for tensor in graph.parameters.values():
        held = graph.tensors[tensor]
        totals[held.dtype] = totals.get(held.dtype, 0) + held.num_bytes
    widest = max(totals, key=lambda dtype: totals[dtype])
    if widest not in _PRECISIONS:
        raise BadInput(f"the module's parameters are {widest}; hethub computes in {', '.join(map(str, _PRECISIONS))}.")
    return _PRECISIONS[widest]


def work(graph: Graph, operator: Operator) -> Work | None:
    """What an operator computes and moves as a whole; None where it only looks at memory in another way."""
    name = short(operator)
    if name in VIEWS or not operator.inputs:
        return None
    products = _products(graph, operator)
    width = graph.tensors[operator.made[0]].dtype.itemsize
    moved = sum(graph.tensors[t].num_bytes for t in (*operator.inputs, *operator.made))
    if products:
        return Work.of(products, width, 0.0, 0.0, 1)
    return Work.of((), width, 0.0, 0.0, 1, fused_bytes=float(moved))


def _products(graph: Graph, operator: Operator) -> tuple[Product, ...]:
    """The matrix products inside an operator."""
    name, shapes = short(operator), graph.shapes_in(operator)
    if name in ("mm.default", "addmm.default"):
        (rows, inner), (_, columns) = shapes[-2:]
        return (Product(rows, columns, inner),)
    if name == "bmm.default":
        (times, rows, inner), (_, _, columns) = shapes
        return (Product(rows, columns, inner, times),)
    if name == "convolution.default":
        return (_convolution(graph.shapes_out(operator)[0], shapes[1]),)
    if name == "convolution_backward.default":
        once = _convolution(shapes[0], shapes[2])
        return (once,) * sum(part is not None for part in operator.outputs[:2])
    if "scaled_dot_product" in name:
        query, key = (shapes[0], shapes[1]) if "backward" not in name else (shapes[1], shapes[2])
        scores = Product(query[2], key[2], query[3], query[0] * query[1])
        return (scores,) * (5 if "backward" in name else 2)
    return ()


def _convolution(output: Sequence[int], weight: Sequence[int]) -> Product:
    return Product(prod(output) / output[1], weight[0], prod(weight[1:]))


@cache
def _operator_seconds(accelerator: AcceleratorSpec, precision: Precision, found: Work) -> tuple[float, float]:
    device = _device(accelerator, precision)
    start = device.seconds(Work.of((), 0, 0.0, 0.0, 1))
    return start, max(device.seconds(found) - start, 0.0)


@cache
def _device(accelerator: AcceleratorSpec, precision: Precision) -> Device:
    return Device(accelerator, precision, HETHUB, packaged())
