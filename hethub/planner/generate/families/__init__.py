"""The systems that hethub unites, each as a generator of its own sort of plan; all evaluated alike.

Start reading: uniform.py, then hethub.py.
May import: spec, predictor, planner.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from hethub.planner.candidate.candidate import Candidate
from hethub.planner.estimate.estimator import Estimator
from hethub.planner.generate.families import cephalo, hethub, poplar, uniform, zorse
from hethub.planner.problem.problem import Problem


class Family(NamedTuple):
    """A system's plans for a problem and costs: candidates that the search may move about, and plans with its own
    schedule, rounds or offloading, which are evaluated as they are. These come in the order of the system's own estimate, or
    of what they compute at least."""

    propose: Callable[[Problem, Estimator], Iterable[Candidate]] = lambda problem, costs: ()
    propose_whole: Callable[[Problem, Estimator], Iterable[Candidate]] = lambda problem, costs: ()


FAMILIES: dict[str, Family] = {
    "uniform": Family(uniform.propose),
    "hethub": Family(hethub.propose),
    "poplar": Family(poplar.propose, poplar.propose_whole),
    "cephalo": Family(propose_whole=cephalo.propose_whole),
    "zorse": Family(zorse.propose, zorse.propose_in_chunks),
}
