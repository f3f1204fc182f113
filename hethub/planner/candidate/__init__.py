"""A plan while it is thought about, the samples its replicas get, and how it becomes a plan.

Start reading: candidate.py, then materialize.py.
May import: spec, planner.problem.
"""
