"""How a plan does where figures are off: its step over sixteen fixed scenarios, the mean of which plans are chosen by.

The scenarios differ in what tells plans apart: how much of their rate links deliver, how fast each device type is beside
the others, and what communication takes from the compute beside it. An error that all plans share, as of all
accelerators' speed at once, cancels and is left out. Every figure takes each of sixteen equally likely values once, in
an order of its own (Latin hypercube), so that two plans meet the same scenarios and a question has one answer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import exp, log
from random import Random
from statistics import NormalDist, fmean, quantiles
from typing import NamedTuple

from hethub.planner.evaluate.processes import at_once
from hethub.planner.problem.problem import Problem
from hethub.planner.problem.scaled import Scale, scaled, scaled_profile
from hethub.predictor.cost.constants import Constants, packaged
from hethub.predictor.cost.intervals import width_of
from hethub.predictor.cost.profile import ProfileSpec
from hethub.predictor.cost.software import HETHUB
from hethub.predictor.pipeline.costs import PlanCosts
from hethub.predictor.pipeline.step import step_times
from hethub.predictor.pipeline.wiring import Wirings
from hethub.spec.cluster import ClusterSpec
from hethub.spec.layout.bind import bind
from hethub.spec.plan import PlanSpec

SCENARIOS = 16
LEAST_LINKS = 0.6  # of their rate, up to all of it: no measured spread of links is in the predictor's table yet
OVERLAP = 2.0  # times more or less, as two standard deviations
EIGHTY = NormalDist().inv_cdf(0.9)  # standard deviations that the predictor's 80 % intervals reach to either side


def speed_errors(problem: Problem) -> dict[str, float]:
    """What the predictor may be off by in each accelerator's speed: standard deviations in logarithms, from the
    cross-validated residuals of its table, more of those that it was not fitted on, and less of those that were measured."""
    known, table = packaged(), packaged().interval
    precision = HETHUB.math_precision(problem.batch.precision)
    compute = {}
    for device_type in problem.device_types:
        name = device_type.accelerator.name
        measured = problem.profile and problem.profile.device(name, problem.batch.precision)
        half = measured.width(table) if measured else width_of(table, True, known.knows(name, precision))
        compute[name] = half / EIGHTY
    return compute


@dataclass(frozen=True)
class Outlook:
    """Seconds of a plan's step: the mean over the scenarios (J), the span of eight tenths of them, and what becomes of
    it where links deliver 60 % of their rate and all else is as predicted."""

    objective_seconds: float
    p10_seconds: float
    p90_seconds: float
    links_at_60_percent_seconds: float


class Scenario(NamedTuple):
    """A cluster, constants and measurements with other figures."""

    cluster: ClusterSpec
    constants: Constants
    profile: ProfileSpec | None


class Outlooks:
    """The scenarios of a question, and plans under them, each asked once; by so many processes."""

    def __init__(self, problem: Problem, processes: int = 1) -> None:
        self.problem, self.processes = problem, processes
        self._known: dict[str, Outlook] = {}

    def of(self, plan: PlanSpec) -> Outlook:
        """The plan's outlook. It must bind."""
        key = plan.model_dump_json()
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._look(plan)
        return found

    def known(self, plan: PlanSpec) -> Outlook | None:
        """Return the outlook if it was computed before, else None."""
        return self._known.get(plan.model_dump_json())

    def in_the_middle(self, plans: Sequence[PlanSpec]) -> list[float]:
        """The steps where links deliver what they do in the mean of the scenarios, and all else is as predicted: of one
        plan beside another it says nearly what the mean over all says, for a sixteenth of the work."""
        return at_once(self._middle_seconds, plans, self.processes)

    def _middle_seconds(self, plan: PlanSpec) -> float:
        return self._steps(plan)(self._with_links((1 + LEAST_LINKS) / 2))

    def _look(self, plan: PlanSpec) -> Outlook:
        asked = (*self._scenarios, self._with_links(LEAST_LINKS))
        *each, at_60_percent = at_once(self._steps(plan), asked, self.processes)
        tenths = quantiles(each, n=10, method="inclusive")
        return Outlook(fmean(each), tenths[0], tenths[-1], at_60_percent)

    def _steps(self, plan: PlanSpec) -> Callable[[Scenario], float]:
        """What gives the plan's step in a scenario. What does not depend on the cluster's figures is found once."""
        layout = bind(plan, self.problem.model, self.problem.cluster)
        costs = PlanCosts(layout, self.problem.software, packaged(), self.problem.profile)
        return partial(_seconds, Wirings(layout), costs)

    def _with_links(self, part: float) -> Scenario:
        """Links at a part of their rate, and all else as predicted."""
        return self._scenario(_links(part), packaged())

    @cached_property
    def _scenarios(self) -> tuple[Scenario, ...]:
        errors = speed_errors(self.problem)
        names = sorted(errors)
        links = [LEAST_LINKS + (1 - LEAST_LINKS) * quantile for quantile in _quantiles("links")]
        speeds = [[NormalDist(0, errors[name]).inv_cdf(q) for q in _quantiles(name)] for name in names]
        overlaps = [NormalDist(0, 0.5 * log(OVERLAP)).inv_cdf(quantile) for quantile in _quantiles("overlap")]
        return tuple(
            self._scenario(_links(link, names, own), _with_overlap(exp(more)))
            for link, own, more in zip(links, zip(*speeds, strict=True), overlaps, strict=True)
        )

    def _scenario(self, scale: Scale, constants: Constants) -> Scenario:
        profile = self.problem.profile
        return Scenario(scaled(self.problem.cluster, scale), constants, profile and scaled_profile(profile, scale))


def _seconds(wirings: Wirings, costs: PlanCosts, scenario: Scenario) -> float:
    anew = costs.with_figures(*scenario)
    return step_times(anew.layout, anew, wirings=wirings).seconds


def _quantiles(name: str) -> list[float]:
    """The middles of sixteen equally likely parts, in an order that depends on the name alone."""
    middles = [(index + 0.5) / SCENARIOS for index in range(SCENARIOS)]
    Random(name).shuffle(middles)
    return middles


def _links(part: float, names: Sequence[str] = (), log_speeds: Sequence[float] = ()) -> Scale:
    """All links at a part of their rate, and device types at other speeds; their mean is left as it is, since it is
    common to all plans."""
    mean = fmean(log_speeds) if log_speeds else 0.0
    compute = {name: exp(own - mean) for name, own in zip(names, log_speeds, strict=True)}
    return Scale(compute=compute, in_node=part, network=part, bridge=part)


def _with_overlap(factor: float) -> Constants:
    known = packaged()
    cost = min(1.0, known.links["overlap_cost"] * factor)
    return replace(known, links={**known.links, "overlap_cost": cost})
