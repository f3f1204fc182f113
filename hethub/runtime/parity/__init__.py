"""Whether a device computes what the formulas say, in units of its own rounding noise, and what it computes instead.

Start reading: check.py, then noise.py and subjects.py.
May import: spec, kernels, communicator, runtime.launch, runtime.measure, runtime.model, runtime.state.
"""
