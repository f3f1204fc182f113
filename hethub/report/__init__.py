"""What people see of plans and runs: tables, traces, pages.

Start reading: tables.py, then html.py.
May import: spec, predictor, planner, capacity, runtime.
"""
