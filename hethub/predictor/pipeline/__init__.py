"""A whole step: the plan's actions as a task graph with costs, replayed; and shortcuts proved equal to the replay.

Start reading: step.py, then task_graph.py and replay.py.
May import: spec, predictor.cost, predictor.memory.
"""
