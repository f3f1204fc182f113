"""Bytes of a rank: how they are counted, and what lies in host memory.

Start reading: accounting.py.
May import: kernels, runtime.pace.
"""
