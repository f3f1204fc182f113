"""Seconds of a layer, the embedding, the head and the optimizer on one accelerator: a roofline per operator."""

from typing import NamedTuple

from hethub.predictor.constants import Constants, packaged, peak_flops
from hethub.predictor.operators import Product, Shape, Work, attention_share, embedding_work, head_work, layer_work
from hethub.predictor.software import HETHUB, MathPrecision, Software
from hethub.spec.accelerator import AcceleratorSpec, Precision
from hethub.spec.model import ModelSpec
from hethub.spec.plan import Recompute


class PassSeconds(NamedTuple):
    """Seconds of one forward and one backward, compute only."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


class Device:
    """An accelerator as the roofline sees it in one precision under one software stack."""

    def __init__(self, accelerator: AcceleratorSpec, precision: MathPrecision, software: Software, constants: Constants) -> None:
        self.efficiency = constants.efficiency(accelerator, precision)
        peak = peak_flops(accelerator, precision)
        self.matmul_flops = peak * self.efficiency.matmul
        self.attention_flops = peak * self.efficiency.attention
        self.memory_bytes = accelerator.memory_gbytes_per_second * 1e9 * self.efficiency.memory
        self.stack = constants.stack(software.stack)

    def seconds(self, work: Work) -> float:
        """Seconds of one pass: the device's, or the host's where launching takes longer."""
        device = sum(self.product_seconds(product) for product in work.products)
        device += work.attention_flops / self.attention_flops + work.elementwise_bytes / self.memory_bytes
        device += work.kernels * self.efficiency.kernel_seconds
        return self.stack * max(device, work.kernels * self.efficiency.launch_seconds)

    def product_seconds(self, product: Product) -> float:
        """A matrix product: slower where a dimension is narrow, and never faster than memory brings its operands."""
        rows, columns, inner, times = product
        narrowness = 1.0 + self.efficiency.narrow * (1.0 / rows + 1.0 / columns + 1.0 / inner)
        moved = 2.0 * times * (rows * inner + inner * columns + rows * columns)
        return max(product.flops * narrowness / self.matmul_flops, moved / self.memory_bytes)


class LayerCost:
    """Seconds of every part of a model on one kind of accelerator; equal questions are answered from memory.

    Build one per (model, accelerator, sequence length, precision) and keep it: the planner asks it many times.
    """

    def __init__(
        self,
        model: ModelSpec,
        accelerator: AcceleratorSpec,
        seq_len: int,
        precision: Precision,
        software: Software = HETHUB,
        constants: Constants | None = None,
    ) -> None:
        self.model, self.accelerator, self.seq_len, self.software = model, accelerator, seq_len, software
        self.precision = software.math_precision(precision)
        self.device = Device(accelerator, self.precision, software, constants or packaged())
        self._layers: dict[tuple[float, float, int, Recompute], PassSeconds] = {}

    def layer(self, samples: float, tp: int = 1, recompute: Recompute = "none", share: float | None = None) -> PassSeconds:
        """One layer, forward and backward, of a micro-batch of `samples` on one rank that holds `share` (default 1/tp).

        Recompute adds the forward (full) or the attention (selective) to the backward.
        """
        share = 1.0 / tp if share is None else share
        key = (samples, share, tp, recompute)
        found = self._layers.get(key)
        if found is None:
            forward, backward = layer_work(self.model, Shape(samples, self.seq_len, share, tp), self.precision, self.software)
            again = self._recompute_fraction(recompute) * self.device.seconds(forward)
            found = self._layers[key] = PassSeconds(self.device.seconds(forward), self.device.seconds(backward) + again)
        return found

    def _recompute_fraction(self, recompute: Recompute) -> float:
        """Which part of a forward runs again in the backward."""
        if recompute == "none":
            return 0.0
        if recompute == "full":
            return 1.0
        return 0.5 if self.software.recompute_selective == "alternate" else attention_share(self.model, self.seq_len, self.software)

    def embedding(self, samples: float) -> PassSeconds:
        """Looking tokens up, and adding their gradients."""
        return PassSeconds(*map(self.device.seconds, embedding_work(self.model, samples * self.seq_len, self.precision)))

    def head(self, samples: float, share: float = 1.0) -> PassSeconds:
        """Final norm, output matrix and loss on a rank that holds `share` of the vocabulary."""
        return PassSeconds(*map(self.device.seconds, head_work(self.model, samples * self.seq_len, share, self.precision)))

    def optimizer(self, parameters: float) -> float:
        """Seconds to zero and norm the gradients of `parameters` and step them with AdamW.

        Bytes per parameter read and written: gradient 3 times (zeroed, norm, step), master and two moments read and
        written, the weight written in its precision.
        """
        width = {"fp64": 8.0, "fp32": 4.0, "tf32": 4.0}.get(self.precision, 4.0)
        return parameters * 10.0 * width / self.device.memory_bytes + 30 * self.device.efficiency.launch_seconds

    def best_layer_samples_per_second(self, max_samples: int) -> float:
        """The rank's best rate of layer-samples, without any communication: what the ceiling is made of.

        The largest share and micro-batch waste least on ramps and narrow products, and recompute only adds, so the
        best is the whole layer at the largest micro-batch; smaller powers of two are looked at for profiles' sake.
        """
        sizes = {max_samples} | {1 << i for i in range(max_samples.bit_length())}
        return max(size / self.layer(size).total for size in sizes)


def layer_rates(
    model: ModelSpec,
    accelerator: AcceleratorSpec,
    seq_len: int,
    precision: Precision,
    micro_batches: tuple[int, ...] = (1, 2, 4, 8, 16),
    tps: tuple[int, ...] = (1,),
    recompute: Recompute = "none",
) -> dict[tuple[int, int], float]:
    """Seconds of forward and backward of one layer per sample, by (micro_batch, tp); compute only."""
    cost = LayerCost(model, accelerator, seq_len, precision)
    return {(b, tp): cost.layer(b, tp, recompute).total / b for b in micro_batches for tp in tps}
