"""The seconds of a layer, the embedding, the head and the optimizer on one accelerator, from a roofline of each operator."""

from dataclasses import replace
from math import gcd
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from hethub.predictor.cost.constants import Constants, Efficiency, attention_peak_flops, is_cpu, packaged, peak_flops
from hethub.predictor.cost.operators import (
    ALIGNED,
    Shape,
    Work,
    attention_work,
    beside_sums,
    embedding_work,
    head_passed_on,
    head_work,
    layer_work,
    weight_work,
)
from hethub.predictor.cost.software import HETHUB, MathPrecision, Software, element_bytes
from hethub.spec.accelerator import AcceleratorSpec, Precision
from hethub.spec.model import ModelSpec
from hethub.spec.plan import Recompute

if TYPE_CHECKING:
    import numpy as np

Number = TypeVar("Number", float, "np.ndarray")
Part = Literal["layer", "embedding", "head"]

# Bytes per parameter and backward of hethub's gradients in fp32, beside a product's own half-precision result. cuBLAS
# reads and writes them as that result (addmm's out_dtype, hethub/runtime/state/parameter.py); elsewhere the result is
# written, read again and added.
SUMMED_IN_PRODUCTS = 4.0 + 4.0 - 2.0
SUMMED_BEHIND_PRODUCTS = 2.0 + 4.0 + 4.0

CUDNN_ATTENTION = (9.0, 10.0)  # compute capabilities for which torch takes cuDNN's attention before FlashAttention 2


def adamw_bytes(precision: MathPrecision) -> float:
    """Return the bytes per parameter that AdamW reads and writes: the gradient three times (zeroed, norm, step), the master
    weight and two moments read and written, and the weight written if its precision is below the master's."""
    width = element_bytes(precision)
    master = max(4, width)
    return 9.0 * master + (width if width < master else 0.0)


class PassSeconds(NamedTuple):
    """The seconds of one forward and one backward, compute only."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


def pass_seconds(work: Work, fit: Efficiency, peak: Any, attention_peak: Any, bandwidth: Any, backward: bool) -> Any:
    """Return the seconds of a pass on a cool device that the host keeps busy.

    Products take their FLOPs at the peak's attainable fraction, slower where a dimension is narrow, plus what blocked
    products move through memory. Arrays are welcome: the fit runs this same line over all measured rows.
    """
    products = fit.backward if backward else 1.0
    device = products * (
        (
            work.flops
            + fit.misaligned * work.misaligned_flops
            + fit.narrow * work.narrow_flops
            + fit.wave_area * work.wave_depth
        )
        / (fit.matmul * peak)
        + (fit.traffic * work.flops + (1.0 + fit.cast) * work.operand_bytes / fit.memory) / bandwidth
    )
    device += work.attention_flops / (fit.attention * attention_peak) + work.kernels * fit.kernel_seconds
    moved = (
        fit.passes * work.elementwise_bytes
        + fit.gradient_bytes * work.gradients
        + fit.logit_bytes * work.logits
        + work.fused_bytes
    )
    return fit.scale * (device + moved / (fit.memory * bandwidth))


def with_launches(device: Any, work: Work, fit: Efficiency) -> Any:
    """Return the seconds of a device with its host, which launches kernels: the longer of both, with a smooth transition where
    they are close."""
    return (device**4 + (work.kernels * fit.launch_seconds) ** 4) ** 0.25


def _gradient_bytes(
    fit: Efficiency, accelerator: AcceleratorSpec, precision: MathPrecision, software: Software
) -> float:
    """Return the bytes per parameter that a backward moves to accumulate gradients. Gradients as wide as the products' results
    are added in place."""
    if element_bytes(precision) > 2:
        return 0.0
    given = software.gradient_pass_bytes
    if given == "by device":
        return SUMMED_IN_PRODUCTS if accelerator.vendor == "nvidia" else SUMMED_BEHIND_PRODUCTS
    return float(fit.gradient_bytes) if given is None else given


def executed_on(accelerator: AcceleratorSpec, software: Software, *, whole_in_half: bool) -> Software:
    """Return the software with the choices that depend on the accelerator. Small operations are compiled on devices only.
    Attention over whole sequences in half precision (`whole_in_half`) is cuDNN's on the generations for which torch prefers
    it (sdp_utils.cpp, `check_prefer_cudnn_attention`)."""
    fused, tuned = software.fused_elementwise, software.tuned_attention
    prefers = whole_in_half and accelerator.compute_capability in CUDNN_ATTENTION
    return replace(
        software,
        fused_elementwise=not is_cpu(accelerator) if fused is None else fused,
        tuned_attention=prefers if tuned is None else tuned,
    )


class Device:
    """An accelerator under sustained load in one precision under one software stack."""

    def __init__(
        self, accelerator: AcceleratorSpec, precision: MathPrecision, software: Software, constants: Constants
    ) -> None:
        if precision == "tf32" and not accelerator.tf32_tflops:
            precision = "fp32"
        fit = constants.efficiency(accelerator, precision)
        scale = fit.scale * constants.stack(software.stack, precision) * (1.0 + fit.throttle)
        tuned = constants.common["tuned_attention"] if software.tuned_attention else 1.0
        slow = constants.common["slow_host"] if software.slow_host else 1.0
        self.fit = replace(
            fit,
            scale=scale,
            gradient_bytes=_gradient_bytes(fit, accelerator, precision, software),
            attention=fit.attention * tuned,
            launch_seconds=0.0 if software.captured else fit.launch_seconds * slow,
        )
        self.peak = peak_flops(accelerator, precision)
        self.attention_peak = attention_peak_flops(accelerator, precision)
        self.bandwidth = accelerator.memory_gbytes_per_second * 1e9

    def seconds(self, work: Work, backward: bool = False) -> float:
        """Return the seconds of one pass: the device's, or the host's where launching kernels takes longer."""
        device = float(pass_seconds(work, self.fit, self.peak, self.attention_peak, self.bandwidth, backward))
        return float(with_launches(device, work, self.fit))

    def both(self, passes: tuple[Work, Work]) -> PassSeconds:
        """Return the seconds of a forward and its backward."""
        return PassSeconds(self.seconds(passes[0]), self.seconds(passes[1], backward=True))


class LayerCost:
    """The seconds of every part of a model on one device type. Answers are kept.

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
        self.model, self.accelerator, self.seq_len = model, accelerator, seq_len
        self.precision = software.math_precision(precision)
        whole = (model.sliding_window or seq_len) >= seq_len
        self.software = executed_on(accelerator, software, whole_in_half=whole and element_bytes(self.precision) == 2)
        self.device = Device(accelerator, self.precision, self.software, constants or packaged())
        self._layers: dict[tuple[float, float, int, Recompute], PassSeconds] = {}

    def layer(
        self, samples: float, tp: int = 1, recompute: Recompute = "none", share: float | None = None
    ) -> PassSeconds:
        """Return the seconds of one layer for a micro-batch of `samples` on one rank that holds `share` of it (default 1/tp).

        Recompute adds the forward (full) or the attention (selective) to the backward.
        """
        share = 1.0 / tp if share is None else share
        key = (samples, share, tp, recompute)
        found = self._layers.get(key)
        if found is None:
            once = self._once("layer", samples, self.seq_len, share)
            again = self._recompute_fraction(recompute, Shape(samples, self.seq_len, share)) * once.forward
            found = self._layers[key] = PassSeconds(once.forward, once.backward + again)
        return found

    def _once(self, part: Part, samples: float, seq_len: int, share: float) -> PassSeconds:
        """Return the seconds of a part without recompute. A head whose loss comes in chunks computes its gradients in the
        forward, while the logits are there, so that its backward only passes them on."""
        if part == "layer":
            shape = Shape(samples, seq_len, share)
            return self.device.both(layer_work(self.model, shape, self.precision, self.software))
        tokens = samples * seq_len / self.software.context_parallel
        if part == "embedding":
            return self.device.both(embedding_work(self.model, tokens, self.precision))
        found = self.device.both(head_work(self.model, tokens, share, self.precision))
        if not self.software.chunked_loss:
            return found
        passed_on = min(found.backward, self.device.seconds(head_passed_on(self.model, tokens, self.precision)))
        return PassSeconds(found.total - passed_on, passed_on)

    def _recompute_fraction(self, recompute: Recompute, shape: Shape) -> float:
        """Return which part of a forward's seconds is run again in the backward. hethub's selective recompute runs attention
        again, which is slower than products of equally many FLOPs."""
        if recompute != "selective":
            return 1.0 if recompute == "full" else 0.0
        if self.software.selective_fraction is not None:
            return self.software.selective_fraction
        asked = (self.model, shape, self.precision, self.software)
        return self.device.seconds(attention_work(*asked)) / self.device.seconds(layer_work(*asked)[0])

    def weight_seconds(self, samples: float, tp: int, share: float) -> float:
        """Return the seconds of a layer's weights' gradients, which zero_bubble puts off. They are a part of the backward
        alone, since what is recomputed comes before it."""
        shape = Shape(samples, self.seq_len, share)
        whole = layer_work(self.model, shape, self.precision, self.software)[1]
        weights = weight_work(self.model, shape, self.precision, self.software)
        part = self.device.seconds(weights, backward=True) / self.device.seconds(whole, backward=True)
        return self.layer(samples, tp, share=share).backward * part

    def sums_beside_weights(self, samples: float, tp: int, share: float, once: float, cost: float) -> float:
        """Return the seconds that a layer's two sums over ranks, `once` each, add to its backward. They overlap with gradients
        of weights: what these do not hide is added, and `cost` for each second that they hide, since sums slow them. Software
        that does not overlap them adds both in full."""
        if not self.software.sums_beside_weights:
            return 2 * once
        asked = (self.model, Shape(samples, self.seq_len, share), self.precision, self.software)
        whole = self.device.seconds(layer_work(*asked)[1], backward=True)
        measured = self.layer(samples, tp, share=share).backward / whole  # 1 without a profile
        beside = [measured * self.device.seconds(work, backward=True) for work in beside_sums(*asked)]
        return sum(max(0.0, once - compute) + cost * min(once, compute) for compute in beside)

    def embedding(self, samples: float) -> PassSeconds:
        """Return the seconds of looking up tokens, and of adding their gradients."""
        return self._once("embedding", samples, self.seq_len, 1.0)

    def head(self, samples: float, share: float = 1.0) -> PassSeconds:
        """Return the seconds of final norm, output matrix and loss on a rank that holds `share` of the vocabulary."""
        return self._once("head", samples, self.seq_len, share)

    def optimizer(self, parameters: Number) -> Number:
        """Return the seconds to zero the gradients of `parameters` (a number or an array), to sum their squares, and to step
        them with AdamW."""
        return (
            parameters * adamw_bytes(self.precision) / (self.device.bandwidth * self.device.fit.memory)
            + 30 * self.device.fit.launch_seconds
        )

    def best_layer_samples_per_second(self, max_samples: int) -> float:
        """Return the most layers times samples per second that the rank reaches, without communication. The ceiling is made of
        these rates.

        The largest share and micro-batch waste least on ramps and narrow products, and recompute only adds. But products take
        longer where tokens do not fill whole lines of memory, so the largest micro-batch whose tokens do is looked at too.
        """
        filling = ALIGNED // gcd(ALIGNED, self.seq_len)
        sizes = {max_samples, max_samples - max_samples % filling or max_samples}
        return max(size / self.layer(size).total for size in sizes)
