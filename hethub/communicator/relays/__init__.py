"""What carries bytes between two ranks of unlike vendors: Gloo, shared memory or MPI, and which of them when.

Start reading: relay.py, then choice.py.
May import: spec, kernels, communicator.joining, communicator.torch_private.
"""
