"""Where candidates come from: every generator is `propose(problem, costs)`.

Start reading: families/, then cuts.py.
May import: spec, planner.candidate, planner.estimate, planner.memo, planner.problem.
"""
