"""Finds the plan: how many layers, heads, samples and bytes of training state each accelerator gets."""

from hethub.planner.explain.diff import PlanDiff, diff
from hethub.planner.plan import plan
from hethub.planner.problem.problem import Batch
from hethub.planner.result import FamilyRow, KindAlone, PlanResult, RunnerUp

__all__ = ["Batch", "FamilyRow", "KindAlone", "PlanDiff", "PlanResult", "RunnerUp", "diff", "plan"]
