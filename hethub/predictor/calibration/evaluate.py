"""The predictor over cases of a table: the one path that `validate` and the fit share with `predict`."""

from dataclasses import replace
from typing import NamedTuple

from hethub.predictor.calibration.sources.training_steps import Case
from hethub.predictor.cost.constants import Constants
from hethub.predictor.memory.ranks import rank_memory
from hethub.predictor.pipeline.costs import PlanCosts
from hethub.predictor.pipeline.step import step_times


class Outcome(NamedTuple):
    """What is predicted for a case: seconds, peak bytes of the fullest rank and whether all ranks have the memory, and
    the micro-batch chosen where it was open."""

    seconds: float
    bytes: int
    fits: bool
    micro_batch: int


def evaluate(case: Case, constants: Constants) -> Outcome:
    """The prediction for a case; of several plans the fastest that fits, else the fastest."""
    tried = []
    for layout in case.layouts:
        seconds = step_times(layout, PlanCosts(layout, case.software, constants)).seconds
        used = rank_memory(layout, case.software)
        fits = all(entry.fits(0.0) for entry in used)
        size = layout.stages[0].replicas[0].micro_batch
        most = max(entry.bytes for entry in used)
        tried.append((not fits, seconds, Outcome(seconds, most, fits, size)))
    return min(tried, key=lambda entry: entry[:2])[2]


class Repricer:
    """One case priced again and again under other constants.

    The plan is chosen once. An interleaved schedule is replayed once, and its ratio to the plain one kept: it depends
    on the pipeline's shape, hardly on the constants.
    """

    def __init__(self, case: Case, constants: Constants) -> None:
        chosen, plain = case.layouts[0], replace(case.software, interleave=1)
        if len(case.layouts) > 1:
            size = evaluate(case, constants).micro_batch
            chosen = next(layout for layout in case.layouts if layout.stages[0].replicas[0].micro_batch == size)
        self.costs = PlanCosts(chosen, plain, constants)
        self.ratio = 1.0
        if case.software.interleave > 1:
            whole = step_times(chosen, PlanCosts(chosen, case.software, constants)).seconds
            self.ratio = whole / step_times(chosen, self.costs).seconds

    def seconds(self, constants: Constants) -> float:
        costs = PlanCosts(self.costs.layout, self.costs.software, constants, like=self.costs)
        return self.ratio * step_times(costs.layout, costs).seconds
