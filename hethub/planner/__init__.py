"""Finds the plan: how many layers, heads, samples and bytes of training state each accelerator gets."""

from hethub.planner.compare import PlanDiff, diff
from hethub.planner.planning import plan
from hethub.planner.problem import Batch
from hethub.planner.result import FamilyRow, KindAlone, PlanResult, RunnerUp

__all__ = ["Batch", "FamilyRow", "KindAlone", "PlanDiff", "PlanResult", "RunnerUp", "diff", "plan"]
