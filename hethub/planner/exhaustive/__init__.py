"""A small space searched to its end: every plan that no bound excludes is timed.

Start reading: search.py.
May import: spec, predictor, planner.
"""
