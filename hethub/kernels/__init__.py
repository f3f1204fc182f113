"""The device layer, and the staging kernels: the same result on every maker's device.

Start reading: device.py, then reference.py.
May import: spec.
"""
