"""Judging predictions of families of sources that a fit has not seen: a publisher and all that repeats its recipes."""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import combinations
from statistics import fmean
from typing import Any

import numpy as np

from hethub.predictor.calibration.sources.training_steps import Case
from hethub.predictor.calibration.validation.errors import ENOUGH_PLANS, run_of, sweep_of
from hethub.predictor.cost.constants import architecture, peak_flops
from hethub.predictor.cost.intervals import COVERAGE
from hethub.predictor.cost.operators import model_flops

DIFFER = np.log(1.1)  # pairs of plans closer than this are not asked which is faster
MANY_CHOICES = 200  # of anchors, beyond which as many are drawn
Estimate = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (rows to learn from, rows to predict) -> log seconds


@cache
def assignment() -> Mapping[str, Sequence[str]]:
    """By family, how its sources' names begin."""
    text = files("hethub.predictor.calibration.validation").joinpath("families.json").read_text(encoding="utf-8")
    found: dict[str, list[str]] = json.loads(text)
    return found


def family_of(source: str) -> str:
    """The family of a source; a source that the file does not name is one of its own."""
    return next((name for name, begins in assignment().items() if source.startswith(tuple(begins))), source)


def leave_out(groups: Sequence[str], estimate: Estimate) -> np.ndarray:
    """Log seconds of every row by an estimate that learned from the rows of all other groups."""
    names, found = np.array(groups), np.zeros(len(groups))
    for name in sorted(set(groups)):
        out = np.flatnonzero(names == name)
        found[out] = estimate(np.flatnonzero(names != name), out)
    return found


def log_measured(cases: Sequence[Case]) -> np.ndarray:
    return np.log([case.measured_seconds for case in cases])


def baseline(cases: Sequence[Case]) -> Estimate:
    """One utilisation per accelerator and precision, the median of the rows learned from; where there are none, that
    of the generation in the precision, then the maker's, then everybody's."""
    keys, log_ideal = [], []
    for case in cases:
        layout, device = case.layouts[0], case.accelerator
        precision = case.software.math_precision(layout.plan.precision)
        flops = model_flops(layout.model, layout.plan.global_batch, layout.plan.seq_len)
        log_ideal.append(np.log(flops / len(layout.cluster.places) / peak_flops(device, precision)))
        keys.append(
            (
                (device.name, precision),
                (architecture(device), precision),
                (device.vendor, precision),
                device.vendor,
                "all",
            )
        )
    ideal, measured = np.array(log_ideal), log_measured(cases)

    def estimate(train: np.ndarray, out: np.ndarray) -> np.ndarray:
        known = defaultdict[Any, list[float]](list)
        for row in train:
            for key in keys[row]:
                known[key].append(measured[row] - ideal[row])
        return np.array([ideal[row] + np.median(next(known[key] for key in keys[row] if key in known)) for row in out])

    return estimate


def percent(errors: np.ndarray) -> np.ndarray:
    """|predicted / measured - 1| of log errors."""
    return 100.0 * np.abs(np.expm1(errors))


def macro(errors: np.ndarray, groups: Sequence[str]) -> tuple[float, dict[str, float]]:
    """The mean of the groups' mean errors in per cent, and each group's."""
    names = np.array(groups)
    means = {name: float(percent(errors[names == name]).mean()) for name in sorted(set(groups))}
    return fmean(means.values()), means


def order(cases: Sequence[Case], errors: np.ndarray) -> dict[str, Any]:
    """How pairs of plans of one sweep are ordered where they differ by more than 10 %, and what choosing by prediction
    costs: means over sweeps."""
    sweeps = defaultdict[tuple[str, ...], list[int]](list)
    for row, case in enumerate(cases):
        sweeps[sweep_of(case)].append(row)
    measured = log_measured(cases)
    predicted, right, pairs, regrets = measured + errors, 0, 0, {}
    for key, rows in sweeps.items():
        if len(rows) < ENOUGH_PLANS:
            continue
        for a, b in combinations(rows, 2):
            if abs(measured[a] - measured[b]) > DIFFER:
                pairs += 1
                right += (measured[a] > measured[b]) == (predicted[a] > predicted[b])
        chosen = min(rows, key=lambda row: predicted[row])
        regrets[" ".join(key[:2])] = 100.0 * float(np.expm1(measured[chosen] - min(measured[rows])))
    return {
        "pairs": pairs,
        "right": 100.0 * right / max(pairs, 1),
        "regret": max(regrets.values(), default=0.0),
        "regrets": regrets,
    }


def anchored(errors: np.ndarray, sources: Sequence[str], count: int) -> dict[str, np.ndarray]:
    """Log errors of each source of five rows or more once `count` of them, any, have set a factor for the rest."""
    random, names, found = np.random.default_rng(0), np.array(sources), {}
    for source in sorted(set(sources)):
        own = errors[names == source]
        if len(own) < 5:
            continue
        choices = list(combinations(range(len(own)), count))
        if len(choices) > MANY_CHOICES:
            choices = [choices[i] for i in random.choice(len(choices), MANY_CHOICES, replace=False)]
        found[source] = np.concatenate([np.delete(own, choice) - np.median(own[list(choice)]) for choice in choices])
    return found


def repeated(cases: Sequence[Case]) -> float:
    """The mean spread in per cent of rows that are the same in all but their time: no prediction can be nearer."""
    alike = defaultdict[tuple[tuple[str, str], ...], list[float]](list)
    for case in cases:
        alike[run_of(case)].append(case.measured_seconds)
    spread = [abs(one / float(np.median(own)) - 1) for own in alike.values() if len(own) > 1 for one in own]
    return 100.0 * fmean(spread) if spread else 0.0


def quantile(errors: np.ndarray, groups: Sequence[str]) -> float:
    """The |log error| that covers 80 % of the rows, groups counting alike.

    Without conformal intervals' correction for a finite sample: that is for groups of one row each. Taking a family as
    one row, it covered 88 % of families that had not set the width, where 80 were meant; without it, 80 %.
    """
    names = np.array(groups)
    weight = np.array([1.0 / (names == name).sum() for name in names])
    ordered = np.argsort(np.abs(errors))
    reached = np.cumsum(weight[ordered]) / weight.sum()
    return float(np.abs(errors)[ordered][min(int(np.searchsorted(reached, COVERAGE)), len(errors) - 1)])


def interval_score(errors: np.ndarray, widths: np.ndarray, groups: Sequence[str]) -> float:
    """The mean over groups of Gneiting and Raftery's interval score of log seconds: width, and what lies outside."""
    names, outside = np.array(groups), np.maximum(0.0, np.abs(errors) - widths)
    score = 2.0 * widths + 2.0 / (1.0 - COVERAGE) * outside
    return fmean(float(score[names == name].mean()) for name in sorted(set(groups)))


def inside(errors: np.ndarray, widths: np.ndarray, groups: Sequence[str]) -> float:
    """Per cent of rows inside their interval, groups counting alike."""
    names = np.array(groups)
    return 100.0 * fmean(float((np.abs(errors) <= widths)[names == name].mean()) for name in sorted(set(groups)))
