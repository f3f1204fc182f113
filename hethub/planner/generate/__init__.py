"""Where candidates come from: a generator's `propose(problem, costs)`, and `best_cuts` of equal ones.

Start reading: families/, then cuts.py.
May import: spec, predictor, planner.candidate, planner.estimate, planner.problem.
"""
