"""Finds the plan: how many layers, heads, samples and bytes of training state each accelerator gets."""

from hethub.planner.planning import plan
from hethub.planner.problem import Batch
from hethub.planner.result import KindAlone, PlanResult, RunnerUp

__all__ = ["Batch", "KindAlone", "PlanResult", "RunnerUp", "plan"]
