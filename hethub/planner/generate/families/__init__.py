"""The systems that hethub unites, each as a planner of its own kind of plan over our specs; all judged alike.

A family yields drafts, as its system's search would propose them; the predictor's judge picks among them with full
link, optimizer and memory cost, whatever the paper left out.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from hethub.planner.candidate.candidate import Draft
from hethub.planner.estimate.costs import UnitCosts
from hethub.planner.estimate.estimator import Surrogate
from hethub.planner.generate.families import cephalo, hethub, ministages, poplar, uniform, zorse
from hethub.planner.problem.problem import Problem

Drafts = Callable[[Problem, UnitCosts], Iterator[Draft]]
# The last argument: seconds to beat. What is proved to take as long need not be made.
Whole = Callable[[Problem, Surrogate, Sequence[Draft], float], Iterator[Draft]]


def _none(problem: Problem, *rest: object) -> Iterator[Draft]:
    return iter(())


class Family(NamedTuple):
    """A system's plans: drafts that the search may move about, and plans with its own schedule, rounds or offloading,
    which may be made from those. `ranked`: the latter come in the order of the system's own estimate."""

    drafts: Drafts = _none
    whole: Whole = _none
    ranked: bool = False


FAMILIES: dict[str, Family] = {
    "uniform": Family(uniform.drafts),
    "hethub": Family(hethub.drafts),
    "poplar": Family(poplar.drafts, poplar.whole, ranked=True),
    "cephalo": Family(whole=cephalo.whole),
    "zorse": Family(zorse.drafts, ministages.drafts, ranked=True),
}
