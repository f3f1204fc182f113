"""The predictor over cases of a table: the one path that `validate` and the fit share with `predict`."""

from dataclasses import replace
from typing import NamedTuple

from hethub.predictor.calibration.sources.training_steps import Case
from hethub.predictor.cost.constants import Constants
from hethub.predictor.memory.ranks import rank_memory
from hethub.predictor.pipeline.costs import PlanCosts
from hethub.predictor.pipeline.step import StepTimes, step_times


class Outcome(NamedTuple):
    """What is predicted for a case: seconds, peak bytes of the fullest rank, and the micro-batch chosen where it was
    open."""

    seconds: float
    bytes: int
    micro_batch: int
    times: StepTimes


def evaluate(case: Case, constants: Constants) -> Outcome:
    """The prediction for a case; of several plans the fastest that fits, else the fastest."""
    tried = []
    for layout in case.layouts:
        times = step_times(layout, PlanCosts(layout, case.software, constants))
        used = max(rank_memory(layout, case.software), key=lambda entry: entry.bytes)
        size = layout.stages[0].replicas[0].micro_batch
        tried.append((not used.fits(0.0), times.seconds, Outcome(times.seconds, used.bytes, size, times)))
    return min(tried, key=lambda entry: entry[:2])[2]


class Repricer:
    """One case priced again and again under other constants.

    The plan is chosen once. An interleaved schedule is replayed once, and its ratio to the plain one kept: it depends
    on the pipeline's shape, hardly on the constants.
    """

    def __init__(self, case: Case, constants: Constants) -> None:
        outcome = evaluate(case, constants)
        chosen = next(lay for lay in case.layouts if lay.stages[0].replicas[0].micro_batch == outcome.micro_batch)
        self.costs = PlanCosts(chosen, replace(case.software, interleave=1), constants)
        self.ratio = outcome.seconds / step_times(chosen, self.costs).seconds

    def seconds(self, constants: Constants) -> float:
        self.costs.set_constants(constants)
        return self.ratio * step_times(self.costs.layout, self.costs).seconds
