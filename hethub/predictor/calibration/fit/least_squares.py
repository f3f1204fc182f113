"""The fitted numbers as a vector: names, priors and how a vector becomes `Constants`."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from hethub.predictor.cost.constants import Constants

MOST_EVALUATIONS = 40


@dataclass(frozen=True)
class Parameter:
    """One fitted number: its place in `Constants`, prior and how far the data may pull it (of a logarithm if `log`)."""

    table: str  # common | links | stacks | architectures | accelerators
    key: str
    field: str  # within architectures and accelerators: log_scale | throttle
    prior: float
    sigma: float
    log: bool
    upper: float = np.inf


def common(key: str, prior: float, sigma: float, upper: float = np.inf) -> Parameter:
    return Parameter("common", key, "", prior, sigma, True, upper)


def link(key: str, prior: float, sigma: float, upper: float = np.inf) -> Parameter:
    return Parameter("links", key, "", prior, sigma, True, upper)


def stack(name: str, prior: float, sigma: float) -> Parameter:
    return Parameter("stacks", name, "", prior, sigma, True)


def scales(table: str, keys: Iterable[str], sigma_scale: float, sigma_throttle: float | None) -> list[Parameter]:
    """A logarithmic scale, and unless None a throttle, for each architecture or accelerator."""
    found = []
    for key in keys:
        found.append(Parameter(table, key, "log_scale", 0.0, sigma_scale, False))
        if sigma_throttle is not None:
            found.append(Parameter(table, key, "throttle", 0.0, sigma_throttle, False))
    return found


def attention_scales(architectures: Iterable[str], sigma: float) -> list[Parameter]:
    """How much of the peak fused attention reaches on each architecture, relative to all."""
    return [Parameter("architectures", key, "log_attention", 0.0, sigma, False) for key in architectures]


def start(parameters: Iterable[Parameter]) -> np.ndarray:
    """The priors as a vector."""
    return np.array([np.log(p.prior) if p.log else p.prior for p in parameters])


def bounds(parameters: Iterable[Parameter]) -> np.ndarray:
    """What a vector may not exceed."""
    return np.array([np.log(p.upper) if p.log else p.upper for p in parameters])


def values(parameters: list[Parameter], vector: np.ndarray) -> list[float]:
    """The numbers themselves."""
    return [float(np.exp(x)) if p.log else float(x) for p, x in zip(parameters, vector, strict=True)]


def apply(base: Constants, parameters: list[Parameter], vector: np.ndarray) -> Constants:
    """`base` with the vector's numbers in their places; scales add to what the base already has."""
    tables: dict[str, dict[str, float]] = {name: dict(getattr(base, name)) for name in ("common", "links", "stacks")}
    nested: dict[str, dict[str, dict[str, float]]] = {
        name: {key: dict(entry) for key, entry in getattr(base, name).items()}
        for name in ("architectures", "accelerators")
    }
    for parameter, value in zip(parameters, values(parameters, vector), strict=True):
        if parameter.table in tables:
            tables[parameter.table][parameter.key] = value
        else:
            known = base.of_accelerator(parameter.key) if parameter.table == "accelerators" else {}
            entry = nested[parameter.table].setdefault(parameter.key, dict(known))
            entry[parameter.field] = entry.get(parameter.field, 0.0) + value
    return replace(
        base,
        common=tables["common"],
        links=tables["links"],
        stacks=tables["stacks"],
        architectures=nested["architectures"],
        accelerators=nested["accelerators"],
    )


def solve(
    base: Constants,
    parameters: list[Parameter],
    residuals: Callable[[Constants], np.ndarray],
    f_scale: float,
) -> Constants:
    """The constants with the least robust sum of squared residuals, priors included (a MAP estimate)."""
    from scipy.optimize import least_squares

    prior, upper = start(parameters), bounds(parameters)
    sigma = np.array([p.sigma for p in parameters])

    def cost(vector: np.ndarray) -> np.ndarray:
        return np.concatenate([residuals(apply(base, parameters, vector)), (vector - prior) / sigma * f_scale])

    found = least_squares(
        cost,
        np.minimum(prior, upper - 1e-6),
        bounds=(-np.inf, upper),
        loss="soft_l1",
        f_scale=f_scale,
        max_nfev=MOST_EVALUATIONS,
    )
    return apply(base, parameters, found.x)
