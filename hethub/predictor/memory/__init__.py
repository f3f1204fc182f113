"""Bytes of every rank at its fullest moment: parameters, activations, state, and the peak of all.

Start reading: ranks.py, then parameters.py, activations.py, state.py and peak.py.
May import: spec, predictor.cost.
"""
