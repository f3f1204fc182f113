"""Why this plan: the makers alone, bottlenecks, what would fit, what was not searched.

Start reading: homogeneous_sum.py, then bottlenecks.py.
May import: spec, predictor, planner.
"""
