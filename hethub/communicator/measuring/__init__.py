"""How fast the communicator is, beside its bound.

Start reading: bench.py, then bound.py.
May import: .
"""
