"""`hethub`: HETHUB's plans (arXiv 2405.16256). TP inside a node, one DP degree, every stage of one device type, uneven
layers."""

from hethub.planner.candidate.candidate import Candidate
from hethub.planner.estimate.estimator import Estimator
from hethub.planner.generate.cuts import best_cuts
from hethub.planner.generate.table import tabulate
from hethub.planner.problem.problem import Problem

PURE_CUTS = 32


def propose(problem: Problem, costs: Estimator) -> list[Candidate]:
    """The best cuts over orders of device types, TP degrees and DP degrees whose stages hold one device type each."""
    return best_cuts(problem, tabulate(problem, costs.unit_costs), PURE_CUTS, pure=True)
