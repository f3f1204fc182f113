"""The last part of the fit: launches, what overlaps, software stacks and the accelerators of whole training steps."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from hethub.predictor.calibration.evaluate import Repricer
from hethub.predictor.calibration.fit.least_squares import (
    Parameter,
    apply,
    attention_scales,
    bounds,
    common,
    link,
    scales,
    stack,
    start,
)
from hethub.predictor.calibration.sources.training_steps import Case
from hethub.predictor.calibration.validation.families import family_of
from hethub.predictor.cost.constants import Constants, architecture, scales_key

F_SCALE = 0.1  # residuals beyond about 10 % count less and less
STEP = 0.02  # of a logarithm, for derivatives
SOURCE_SIGMA = 0.2  # of a logarithm: how far sources lie apart that ran alike
REWEIGHTED = 30  # rounds of robust least squares
NEW_VALUES = 2  # rounds of values priced anew; derivatives, which change little, are kept


def step_parameters(cases: Sequence[Case], base: Constants) -> list[Parameter]:
    """Every number that the cases can tell, given what layers told of the rooflines and collectives of the links."""
    accelerators = sorted({_accelerator_key(case) for case in cases})
    architectures = sorted({_architecture_key(case) for case in cases})
    fused = sorted({_architecture_key(case) for case in cases if case.software.fused_attention})
    return [
        link("pcie_fraction", 0.3, 0.4, upper=1.0),
        link("overlap_cost", 0.4, 0.5, upper=1.0),
        link("hosted_latency_seconds", 1e-4, 0.5),
        common("launch_seconds", 1.5e-5, 0.4),
        common("slow_host", 2.0, 0.5),
        common("kernel_seconds", base.common["kernel_seconds"], 0.3),
        common("logit_bytes", 12.0, 0.4),
        common("wave_area", base.common["wave_area"], 0.7),
        link("tensor_parallel_shown", 0.4, 0.5, upper=1.0),
        common("tuned_attention", 1.6, 0.2, upper=2.0),
        common("cast_bytes", 1.0, 0.5),
        common("misaligned", base.common["misaligned"], 0.5),
        common("fp8_matmul", base.common["fp8_matmul"], 0.1),
        common("fp4_matmul", 0.8, 0.2),
        Parameter("common", "stack_mean", "", 0.0, 0.2, False),
        *[stack(name, 1.0, 0.15) for name in sorted({case.software.stack for case in cases})],
        *scales("accelerators", accelerators, 0.1, None),
        *scales("architectures", [name for name in architectures if name not in base.architectures], 0.1, None),
        *attention_scales(fused, 0.4),
    ]


def _accelerator_key(case: Case) -> str:
    return scales_key(case.accelerator.name, case.software.math or "bf16")


def _architecture_key(case: Case) -> str:
    return scales_key(architecture(case.accelerator), case.software.math or "bf16")


def _affected(parameter: Parameter, cases: Sequence[Case]) -> np.ndarray:
    """The rows whose prediction a parameter can change."""
    key = {
        "stacks": lambda case: case.software.stack,
        "accelerators": _accelerator_key,
        "architectures": _architecture_key,
    }.get(parameter.table)
    return np.arange(len(cases)) if key is None else np.flatnonzero([key(case) == parameter.key for case in cases])


class Linear(NamedTuple):
    """Logarithms of predicted seconds around a point: values, derivatives, and the point."""

    parameters: list[Parameter]
    point: np.ndarray
    values: np.ndarray
    slopes: np.ndarray  # (rows, parameters)


def linearise(
    base: Constants,
    parameters: list[Parameter],
    point: np.ndarray,
    cases: Sequence[Case],
    repricers: Sequence[Repricer],
) -> Linear:
    """Derivatives by differences, only of the rows that a parameter can change. All that scale device time have the
    same one, so it is asked once."""
    everything = np.arange(len(cases))
    values = price(repricers, apply(base, parameters, point), everything)

    def slope(column: int, rows: np.ndarray) -> np.ndarray:
        moved = point.copy()
        moved[column] -= STEP
        return np.asarray((values[rows] - price(repricers, apply(base, parameters, moved), rows)) / STEP)

    slopes = np.zeros((len(cases), len(parameters)))
    for column, parameter in enumerate(parameters):
        rows = _affected(parameter, cases)
        slopes[rows, column] = slope(column, rows)
    return Linear(parameters, point, values, slopes)


def weights(sources: Sequence[str]) -> np.ndarray:
    """A weight for each row: families of sources count alike, and in them sources; rows by the root of their number."""
    rows, families = Counter(sources), [family_of(source) for source in sources]
    members = Counter(family_of(source) for source in set(sources))
    found = np.array([(rows[s] * members[f]) ** -0.5 for s, f in zip(sources, families, strict=True)])
    return np.asarray(found / found.mean())


def improve(linear: Linear, cases: Sequence[Case], rows: np.ndarray) -> np.ndarray:
    """The vector that fits `rows` best by the linear model: robust least squares of logarithms, with its priors.

    Every source has an offset of its own beside (its machine, its year, how it counted), which no prediction uses: what
    sets one publisher apart moves no accelerator's constants. Errors beyond `F_SCALE` count less and less (soft L1), by
    least squares of reweighted rows.
    """
    sources = [cases[row].source for row in rows]
    measured, weight = np.log([cases[row].measured_seconds for row in rows]), weights(sources)
    of_source = (np.array(sources)[:, None] == np.array(sorted(set(sources)))).astype(float)
    prior = np.concatenate([start(linear.parameters), np.zeros(of_source.shape[1])])
    sigma = np.concatenate([[p.sigma for p in linear.parameters], np.full(of_source.shape[1], SOURCE_SIGMA)])
    upper = np.concatenate([bounds(linear.parameters), np.full(of_source.shape[1], np.inf)])
    slopes = np.hstack([linear.slopes[rows], of_source])
    slopes = np.vstack([weight[:, None] * slopes, np.diag(F_SCALE / sigma)])
    fixed = measured - linear.values[rows] + linear.slopes[rows] @ linear.point
    wanted = np.concatenate([weight * fixed, prior / sigma * F_SCALE])
    vector = np.minimum(prior, upper)
    for _ in range(REWEIGHTED):
        counts = (1.0 + ((slopes @ vector - wanted) / F_SCALE) ** 2) ** -0.5
        vector = _bounded(slopes.T @ (counts[:, None] * slopes), slopes.T @ (counts * wanted), upper)
    return np.asarray(vector[: len(linear.parameters)])


def _bounded(matrix: np.ndarray, target: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """The solution of normal equations; what would be beyond its bound stays on it."""
    held = np.zeros(len(target), dtype=bool)
    vector = np.linalg.solve(matrix, target)
    while (beyond := (vector > upper) & ~held).any():
        held |= beyond
        vector[held] = upper[held]
        free = ~held
        rest = target[free] - matrix[np.ix_(free, held)] @ upper[held]
        vector[free] = np.linalg.solve(matrix[np.ix_(free, free)], rest)
    return vector


def price(repricers: Sequence[Repricer], constants: Constants, rows: Iterable[int]) -> np.ndarray:
    """Logarithms of the seconds of some rows; equal plans are priced once."""
    own = [repricers[row] for row in rows]
    seconds = {repricer: repricer.seconds(constants) for repricer in dict.fromkeys(own)}
    return np.log([seconds[repricer] for repricer in own])


def fit_steps(base: Constants, cases: Sequence[Case], repricers: Sequence[Repricer]) -> tuple[Constants, Linear]:
    """The constants that price the cases best, and the linear model around them for refits without some rows."""
    parameters = step_parameters(cases, base)
    everything = np.arange(len(cases))
    linear = linearise(base, parameters, start(parameters), cases, repricers)
    for _ in range(NEW_VALUES):
        point = improve(linear, cases, everything)
        linear = linear._replace(point=point, values=price(repricers, apply(base, parameters, point), everything))
    return apply(base, parameters, linear.point), linear


def refit_without(base: Constants, linear: Linear, cases: Sequence[Case], out: np.ndarray) -> Constants:
    """The constants of a fit that never saw the rows `out`: a stack or accelerator only they have stays at its prior.

    Of all rows it takes the point around which the linear model was made, and no more.
    """
    rows = np.setdiff1d(np.arange(len(cases)), out)
    return apply(base, linear.parameters, improve(linear, cases, rows))
