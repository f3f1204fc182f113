"""Where bytes cross vendors: collectives and messages between islands, through host memory.

Start reading: collectives.py (then routes.py, exchange.py and device_side.py), messages.py.
May import: spec, kernels, communicator.
"""
