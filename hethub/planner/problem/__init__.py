"""The question: model, cluster, batch and constraints, with equal accelerators as device types.

Start reading: problem.py.
May import: spec, predictor.
"""
