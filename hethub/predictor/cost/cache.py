"""Caches. Layer costs under the packaged constants are kept from one prediction to the next, since a search asks for the same
sizes again and again."""

from collections.abc import Callable, Hashable
from functools import lru_cache, wraps
from typing import Any, TypeVar, cast

from hethub.predictor.cost.constants import Constants, packaged
from hethub.predictor.cost.layer import LayerCost
from hethub.predictor.cost.profile import DeviceProfile, ProfileSpec
from hethub.predictor.cost.profiled_layer import ProfiledLayerCost
from hethub.predictor.cost.software import MathPrecision, Software
from hethub.spec.accelerator import AcceleratorSpec, Precision
from hethub.spec.model import ModelSpec

Method = TypeVar("Method", bound=Callable[..., Any])


def memoized(method: Method) -> Method:
    """Compute a method only once for the same positional arguments: what `cached_property` is for methods with arguments."""
    name = f"{method.__qualname__}()"  # no attribute's, and not that of a method which it overrides

    @wraps(method)
    def asked(self: object, *given: Hashable) -> Any:
        try:
            return self.__dict__[name][given]
        except KeyError:
            found = self.__dict__.setdefault(name, {})[given] = method(self, *given)
            return found

    return cast(Method, asked)


class SharedLayerCost(LayerCost):
    """A `LayerCost` that keeps every answer."""

    embedding = memoized(LayerCost.embedding)
    head = memoized(LayerCost.head)
    weight_seconds = memoized(LayerCost.weight_seconds)
    best_layer_samples_per_second = memoized(LayerCost.best_layer_samples_per_second)


@lru_cache(maxsize=128)
def shared_layer_cost(
    model: ModelSpec, accelerator: AcceleratorSpec, seq_len: int, precision: Precision, software: Software
) -> SharedLayerCost:
    """Return the layer cost of a model on one device type under the packaged constants."""
    return SharedLayerCost(model, accelerator, seq_len, precision, software)


def layer_cost_of(
    model: ModelSpec,
    accelerator: AcceleratorSpec,
    seq_len: int,
    precision: Precision,
    software: Software,
    profile: ProfileSpec | None,
    constants: Constants,
) -> LayerCost:
    """Return the layer cost of a model on one device type, corrected if there is a profile of it."""
    asked = (model, accelerator, seq_len, precision, software)
    measured = profile.device(accelerator.name, precision) if profile else None
    usual = constants is packaged()  # what these say is kept over predictions
    if measured is None:
        return shared_layer_cost(*asked) if usual else LayerCost(*asked, constants)
    return (CeilingKept if usual else ProfiledLayerCost)(*asked, constants).use(measured)


class CeilingKept(ProfiledLayerCost):
    """A `ProfiledLayerCost` that keeps its best rate from one prediction to the next: finding it tries some 500 corrected layers,
    more than the rest of a prediction. Everything else belongs to one prediction, which notes whether it asked beyond what
    was measured."""

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
