"""Published measurements as cases that the predictor can price.

Start reading: training_steps.py.
May import: spec, predictor.cost, predictor.memory.
"""
