"""Bytes of every rank at its fullest moment, by part.

Start reading: ranks.py.
May import: spec, predictor.cost.
"""
