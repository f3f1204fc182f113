"""Layer costs under the packaged constants, kept over predictions: a search asks for the same sizes again and again."""

from collections.abc import Callable, Hashable
from functools import lru_cache

from hethub.predictor.cost.layer import LayerCost, PassSeconds
from hethub.predictor.cost.profile import DeviceProfile
from hethub.predictor.cost.profiled_layer import ProfiledLayerCost
from hethub.predictor.cost.software import MathPrecision, Software
from hethub.spec.accelerator import AcceleratorSpec, Precision
from hethub.spec.model import ModelSpec


class SharedLayerCost(LayerCost):
    """As `LayerCost`, with every answer kept."""

    def __init__(
        self, model: ModelSpec, accelerator: AcceleratorSpec, seq_len: int, precision: Precision, software: Software
    ) -> None:
        super().__init__(model, accelerator, seq_len, precision, software)
        self._passes: dict[Hashable, PassSeconds] = {}
        self._weight_shares: dict[tuple[float, float], float] = {}
        self._best_rates: dict[int, float] = {}

    def embedding(self, samples: float) -> PassSeconds:
        return self._once(samples, super().embedding, samples)

    def head(self, samples: float, share: float = 1.0) -> PassSeconds:
        return self._once((samples, share), super().head, samples, share)

    def _once(self, key: Hashable, compute: Callable[..., PassSeconds], *asked: float) -> PassSeconds:
        found = self._passes.get(key)
        if found is None:
            found = self._passes[key] = compute(*asked)
        return found

    def weight_share(self, samples: float, share: float) -> float:
        found = self._weight_shares.get((samples, share))
        if found is None:
            found = self._weight_shares[samples, share] = super().weight_share(samples, share)
        return found

    def best_layer_samples_per_second(self, max_samples: int) -> float:
        found = self._best_rates.get(max_samples)
        if found is None:
            found = self._best_rates[max_samples] = super().best_layer_samples_per_second(max_samples)
        return found


@lru_cache(maxsize=128)
def shared_layer_cost(
    model: ModelSpec, accelerator: AcceleratorSpec, seq_len: int, precision: Precision, software: Software
) -> SharedLayerCost:
    """The one of a model on one device type, by the packaged constants."""
    return SharedLayerCost(model, accelerator, seq_len, precision, software)


class CeilingKept(ProfiledLayerCost):
    """As `ProfiledLayerCost`, with its best rate kept over predictions: that looks at some 500 corrected layers, more than
    the rest of a prediction. All else is each prediction's own, which notes whether it asked beyond what was measured."""

    def best_layer_samples_per_second(self, max_samples: int) -> float:
        asked = (self.model, self.accelerator, self.seq_len, self.precision, self.software)
        return _best_rate(*asked, self.profile, max_samples)


@lru_cache(maxsize=128)
def _best_rate(
    model: ModelSpec, accelerator: AcceleratorSpec, seq_len: int, precision: MathPrecision, software: Software,
    profile: DeviceProfile, max_samples: int,
) -> float:  # fmt: skip
    cost = ProfiledLayerCost(model, accelerator, seq_len, precision, software).use(profile)  # type: ignore[arg-type]
    return cost.best_layer_samples_per_second(max_samples)
