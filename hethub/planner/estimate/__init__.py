"""Seconds and bytes of thousands of candidates in closed form.

Start reading: estimator.py.
May import: .
"""
