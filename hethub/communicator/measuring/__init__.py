"""How fast the communicator is, beside its bound.

Start reading: bench.py, then bound.py.
May import: spec, communicator.bridge, communicator.counters, communicator.joining, communicator.torch_private, communicator.world.
"""
