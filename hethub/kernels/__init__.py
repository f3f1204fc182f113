"""The device layer, the staging kernels and the sum of squares: the same result on every maker's device.

Start reading: device.py, then reference.py.
May import: spec.
"""
