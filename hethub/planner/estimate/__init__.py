"""Seconds and bytes of thousands of candidates in closed form.

Start reading: cost_model.py, then estimator.py.
May import: spec, predictor, planner.candidate, planner.memo, planner.problem.
"""
