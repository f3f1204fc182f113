"""The second half of the fit: links, launches, software stacks and the accelerators of whole training steps."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hethub.predictor.calibration.evaluate import Repricer
from hethub.predictor.calibration.fit.least_squares import (
    Parameter,
    apply,
    attention_scales,
    common,
    link,
    scales,
    stack,
)
from hethub.predictor.calibration.sources.training_steps import Case
from hethub.predictor.cost.constants import Constants, family, precision_class
from hethub.spec.accelerator import AcceleratorSpec

F_SCALE = 0.1  # residuals beyond about 10 % count less and less
STEP = 0.02  # of a logarithm, for derivatives
REACH = 0.5  # how far one linear model is trusted
NEW_DERIVATIVES, NEW_VALUES = 3, 2  # rounds: of linear models, and within each of values priced anew


def step_parameters(cases: Sequence[Case], base: Constants) -> list[Parameter]:
    """Every number that the cases can tell, given what layer times told of the rooflines."""
    accelerators = sorted({_accelerator_key(case) for case in cases})
    families = sorted({_family_key(case) for case in cases})
    fused = sorted({_family_key(case) for case in cases if case.software.fused_attention})
    return [
        link("in_node_fraction", 0.75, 0.2, upper=1.0),
        link("pcie_fraction", 0.3, 0.4, upper=1.0),
        link("between_nodes_fraction", 0.75, 0.2, upper=1.0),
        link("collective_latency_seconds", 3e-5, 0.5),
        link("overlap_cost", 0.4, 0.5, upper=1.0),
        link("hosted_latency_seconds", 1e-4, 0.5),
        common("launch_seconds", 1.5e-5, 0.4),
        common("kernel_seconds", base.common["kernel_seconds"], 0.3),
        common("logit_bytes", 12.0, 0.4),
        common("wave_area", base.common["wave_area"], 0.7),
        *[stack(name) for name in sorted({case.software.stack for case in cases})],
        *scales("accelerators", accelerators, 0.1, None),
        *scales("families", [name for name in families if name not in base.families], 0.1, None),
        *attention_scales(fused, 0.4),
    ]


def _accelerator(case: Case) -> AcceleratorSpec:
    return case.layouts[0].cluster.places[0].accelerator


def _accelerator_key(case: Case) -> str:
    return f"{_accelerator(case).name} {precision_class(case.software.math or 'bf16')}"


def _family_key(case: Case) -> str:
    return f"{family(_accelerator(case))} {precision_class(case.software.math or 'bf16')}"


def _affected(parameter: Parameter, cases: Sequence[Case]) -> np.ndarray:
    """The rows whose prediction a parameter can change."""
    key = {"stacks": lambda case: case.software.stack, "accelerators": _accelerator_key, "families": _family_key}.get(
        parameter.table
    )
    return np.arange(len(cases)) if key is None else np.flatnonzero([key(case) == parameter.key for case in cases])


class Linear(NamedTuple):
    """Logarithms of predicted seconds around a point: values, derivatives, and the point."""

    parameters: list[Parameter]
    point: np.ndarray
    values: np.ndarray
    slopes: np.ndarray  # (rows, parameters)


def start(parameters: list[Parameter]) -> np.ndarray:
    """The priors as a vector."""
    return np.array([np.log(p.prior) if p.log else p.prior for p in parameters])


def linearise(
    base: Constants,
    parameters: list[Parameter],
    point: np.ndarray,
    cases: Sequence[Case],
    repricers: Sequence[Repricer],
) -> Linear:
    """Derivatives by differences, only of the rows that a parameter can change."""
    constants = apply(base, parameters, point)
    values = np.log([repricer.seconds(constants) for repricer in repricers])
    slopes = np.zeros((len(cases), len(parameters)))
    for column, parameter in enumerate(parameters):
        moved = point.copy()
        moved[column] -= STEP
        constants = apply(base, parameters, moved)
        for row in _affected(parameter, cases):
            slopes[row, column] = (values[row] - np.log(repricers[row].seconds(constants))) / STEP
    return Linear(parameters, point, values, slopes)


def improve(linear: Linear, cases: Sequence[Case], rows: np.ndarray) -> np.ndarray:
    """The vector that fits `rows` best as far as the linear model is trusted; every source counts alike."""
    from scipy.optimize import least_squares

    measured = np.log([cases[row].measured_seconds for row in rows])
    sources = [cases[row].source for row in rows]
    weight = np.array([sources.count(source) ** -0.5 for source in sources])
    weight /= weight.mean()
    prior = start(linear.parameters)
    sigma = np.array([p.sigma for p in linear.parameters])
    upper = np.array([np.log(p.upper) if p.log else p.upper for p in linear.parameters])

    def cost(vector: np.ndarray) -> np.ndarray:
        seconds = linear.values[rows] + linear.slopes[rows] @ (vector - linear.point)
        return np.concatenate([weight * (seconds - measured), (vector - prior) / sigma * F_SCALE])

    bounds = (linear.point - REACH, np.maximum(np.minimum(linear.point + REACH, upper), linear.point + 1e-9))
    return np.asarray(least_squares(cost, linear.point, bounds=bounds, loss="soft_l1", f_scale=F_SCALE).x)


def revalue(
    linear: Linear,
    base: Constants,
    point: np.ndarray,
    cases: Sequence[Case],
    repricers: Sequence[Repricer],
    rows: np.ndarray,
) -> Linear:
    """The linear model moved to another point: what `rows` take is priced anew there, the derivatives are kept.

    An eighteenth of the work of new derivatives, which hardly change where values have converged.
    """
    constants = apply(base, linear.parameters, point)
    values = linear.values + linear.slopes @ (point - linear.point)
    values[rows] = np.log([repricers[row].seconds(constants) for row in rows])
    return linear._replace(point=point, values=values)


def fit_steps(base: Constants, cases: Sequence[Case], repricers: Sequence[Repricer]) -> tuple[Constants, Linear]:
    """The constants that price the cases best, and the linear model around them for refits without some rows."""
    parameters = step_parameters(cases, base)
    everything = np.arange(len(cases))
    linear = linearise(base, parameters, start(parameters), cases, repricers)
    for _ in range(NEW_DERIVATIVES):
        point = _settle(linear, base, cases, repricers, everything)
        linear = linearise(base, parameters, point, cases, repricers)
    return apply(base, parameters, linear.point), linear


def _settle(
    linear: Linear, base: Constants, cases: Sequence[Case], repricers: Sequence[Repricer], rows: np.ndarray
) -> np.ndarray:
    """The vector that fits `rows` best, values priced anew on the way."""
    point = improve(linear, cases, rows)
    for _ in range(NEW_VALUES):
        point = improve(revalue(linear, base, point, cases, repricers, rows), cases, rows)
    return point


def refit_without(
    base: Constants, linear: Linear, cases: Sequence[Case], repricers: Sequence[Repricer], out: np.ndarray
) -> Constants:
    """The constants of a fit that never saw the rows `out`: a stack or accelerator only they have stays at its prior.

    Of all rows it takes the derivatives only.
    """
    rows = np.setdiff1d(np.arange(len(cases)), out)
    return apply(base, linear.parameters, _settle(linear, base, cases, repricers, rows))
