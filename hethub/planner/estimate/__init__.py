"""Seconds and bytes of thousands of candidates in closed form.

Start reading: estimator.py, then stage_times.py.
May import: spec, predictor, planner.candidate, planner.problem.
"""
