"""How fast the communicator is, beside its bound.

Start reading: bench.py.
May import: .
"""
