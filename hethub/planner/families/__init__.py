"""The systems that hethub unites, each as a planner of its own kind of plan over our specs; all judged alike.

A family yields drafts, as its system's search would propose them; the predictor's judge picks among them with full link,
optimizer and memory cost, whatever the paper left out.
"""

from collections.abc import Callable, Iterator

from hethub.planner.costs import UnitCosts
from hethub.planner.draft import Draft
from hethub.planner.families import cephalo, hethub, poplar, uniform, zorse
from hethub.planner.problem import Problem

Family = Callable[[Problem, UnitCosts], Iterator[Draft]]

FAMILIES: dict[str, Family] = {
    "uniform": uniform.drafts,
    "hethub": hethub.drafts,
    "poplar": poplar.drafts,
    "cephalo": cephalo.drafts,
    "zorse": zorse.drafts,
}
