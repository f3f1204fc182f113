"""Emulated accelerators and networks on CPUs: real mathematics in planned time.

Start reading: pace.py, then world.py.
May import: spec, kernels, predictor, communicator, runtime.measure, runtime.memory, runtime.pace.
"""
