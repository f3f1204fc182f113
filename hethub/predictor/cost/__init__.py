"""Seconds of one thing by itself: an operator, a layer, the optimizer's step, a message, a collective.

Start reading: layer.py, then links.py.
May import: spec.
"""
