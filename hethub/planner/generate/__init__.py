"""Where candidates come from: every generator is `propose(problem, costs)`.

Start reading: families/, then cuts.py.
May import: spec, predictor, planner.candidate, planner.estimate, planner.problem.
"""
