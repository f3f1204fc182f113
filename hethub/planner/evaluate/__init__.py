"""Candidates bound and predicted with full cost, each once, and the best of them so far.

Start reading: evaluator.py, then incumbent.py.
May import: spec, predictor, planner.candidate, planner.estimate, planner.problem.
"""
