"""The systems that hethub unites, each as a generator of its own sort of plan; all evaluated alike.

Start reading: uniform.py, then hethub.py.
May import: spec, predictor, planner.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from hethub.planner.candidate.candidate import Candidate
from hethub.planner.estimate.estimator import Estimator
from hethub.planner.generate.families import cephalo, hethub, ministages, poplar, uniform, zorse
from hethub.planner.problem.problem import Problem


def _none(problem: Problem, costs: Estimator, *, limit_seconds: float = float("inf")) -> Iterable[Candidate]:
    return ()


class Family(NamedTuple):
    """A system's plans for a problem and costs: candidates that the search may move about, and whole plans with its own
    schedule, rounds or offloading, which are evaluated as they stand. Each of these takes the predictor's memory to make, so
    none is made that is proved to take `limit_seconds`. `ranked`: they come in the order of the system's own estimate.
    `are_pure_cuts`: the former are the best cuts of one device type a stage, which a search makes anyway."""

    propose: Callable[[Problem, Estimator], Iterable[Candidate]] = _none
    propose_whole: Callable[..., Iterable[Candidate]] = _none
    ranked: bool = False
    are_pure_cuts: bool = False


FAMILIES: dict[str, Family] = {
    "uniform": Family(uniform.propose),
    "hethub": Family(hethub.propose, are_pure_cuts=True),
    "poplar": Family(poplar.propose, poplar.propose_whole, ranked=True),
    "cephalo": Family(propose_whole=cephalo.propose_whole),
    "zorse": Family(zorse.propose, ministages.propose_whole, ranked=True),
}
