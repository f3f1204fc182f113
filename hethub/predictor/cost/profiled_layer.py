"""Layer costs of a device type that a profile measured: the roofline, corrected by measured ratios."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

from hethub.predictor.cost.constants import Constants
from hethub.predictor.cost.layer import LayerCost, Number, Part, PassSeconds
from hethub.predictor.cost.profile import Corrections, DeviceProfile, LayerTiming, PartTiming
from hethub.predictor.cost.software import HETHUB, Software
from hethub.spec.accelerator import AcceleratorSpec, Precision
from hethub.spec.layout.tensors import tp_degrees
from hethub.spec.model import ModelSpec


class ProfiledLayerCost(LayerCost):
    """A `LayerCost` that is corrected by what one device type measured. `extrapolated` becomes true when it is asked beyond
    what was measured."""

    def use(self, profile: DeviceProfile) -> Self:
        """Use a profile's measurements, as ratios to the roofline's estimates."""
        self.profile, self.extrapolated = profile, False
        self._optimizer_seconds = profile.optimizer_seconds_per_parameter
        self._optimizer_factor = profile.optimizer_factor
        timings: dict[Part, Sequence[LayerTiming | PartTiming]] = {"layer": profile.layers}
        timings["embedding"] = [timing for timing in profile.parts if timing.part == "embedding"]
        timings["head"] = [timing for timing in profile.parts if timing.part == "head"]
        self._ratios = {part: self._corrections(part, measured) for part, measured in timings.items() if measured}
        return self

    def _corrections(self, part: Part, timings: Sequence[LayerTiming | PartTiming]) -> tuple[Corrections, Corrections]:
        forward, backward = (partial(self._estimate_pass, part, which) for which in (0, 1))
        return Corrections.of(timings, "forward_seconds", forward), Corrections.of(
            timings, "backward_seconds", backward
        )

    def _estimate_pass(self, part: Part, which: int, samples: int, seq_len: int, tp: int) -> float:
        return super()._once(part, samples, seq_len, 1.0 / tp)[which]

    def _once(self, part: Part, samples: float, seq_len: int, share: float) -> PassSeconds:
        ratios = self._ratios.get(part)
        if ratios is None:
            return super()._once(part, samples, seq_len, share)
        self.extrapolated |= ratios[0].extrapolates(samples, seq_len, 1.0 / share)
        if samples > (most := ratios[0].most_samples):  # a sample gets no cheaper than any measurement has shown
            forward, backward = self._once(part, most, seq_len, share)
            return PassSeconds(forward * samples / most, backward * samples / most)
        seconds = super()._once(part, samples, seq_len, share)
        forward, backward = (ratio.at(samples, seq_len, 1.0 / share) for ratio in ratios)
        return PassSeconds(seconds.forward * forward, seconds.backward * backward)

    def optimizer(self, parameters: Number) -> Number:
        measured = self._optimizer_seconds
        seconds = super().optimizer(parameters) if measured is None else parameters * measured
        return seconds * self._optimizer_factor

    def best_layer_samples_per_second(self, max_samples: int) -> float:
        """Return the best rate, as the roofline does. Measured ratios need not fall with size or share, so many of each are
        tried."""
        sizes = (
            {max_samples} | {1 << i for i in range(max_samples.bit_length())} | set(range(1, min(64, max_samples) + 1))
        )
        shares = [1.0 / tp for tp in range(1, 9)]
        return max(size * share / self.layer(size, share=share).total for size in sizes for share in shares)


def estimated_device(
    model: ModelSpec,
    accelerator: AcceleratorSpec,
    seq_len: int,
    precision: Precision,
    largest: int,
    constants: Constants | None = None,
    half_width: float | None = None,
    software: Software = HETHUB,
) -> DeviceProfile:
    """Return what is expected of an accelerator under `software` in the form of a profile, for micro-batches of 1 to `largest`
    samples and all tensor-parallel degrees. Only the ratios of later measurements to it matter, and the half width of its
    80 % intervals, if one is given."""
    cost = LayerCost(model, accelerator, seq_len, precision, software, constants)
    sizes = sorted({1 << bit for bit in range(largest.bit_length())} | {largest})

    def timings(passes: Callable[[int, int], PassSeconds]) -> list[dict[str, Any]]:
        """Return the timings of a part, by micro-batch and degree."""
        return [
            {
                "micro_batch": size,
                "seq_len": seq_len,
                "tp": tp,
                "forward_seconds": own.forward,
                "backward_seconds": own.backward,
            }
            for size in sizes
            for tp in tp_degrees(model)
            for own in [passes(size, tp)]
        ]

    embedding = [PartTiming(part="embedding", **each) for each in timings(lambda size, tp: cost.embedding(size))]
    head = [PartTiming(part="head", **each) for each in timings(lambda size, tp: cost.head(size, 1.0 / tp))]
    return DeviceProfile(
        accelerator=accelerator.name,
        precision=precision,
        layers=tuple(LayerTiming(**each) for each in timings(cost.layer)),
        parts=(*embedding, *head),
        half_width=half_width,
    )
