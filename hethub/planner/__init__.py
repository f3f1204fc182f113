"""Finds the plan: how many layers, heads, samples and bytes of training state each accelerator gets.

Start reading: plan.py, then search/auto.py.
May import: spec, predictor.
"""

from hethub.planner.plan import plan
from hethub.planner.problem.problem import Batch
from hethub.planner.result import FamilyRow, HomogeneousPart, PlanResult, RunnerUp

__all__ = [
    "Batch",
    "FamilyRow",
    "HomogeneousPart",
    "PlanResult",
    "RunnerUp",
    "plan",
]
