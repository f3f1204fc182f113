"""Bytes of every rank at its fullest moment: parameters, activations, state, and the peak of all.

Start reading: ranks.py, then parameters.py.
May import: spec, predictor.cost.
"""
