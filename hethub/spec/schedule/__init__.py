"""The order of work: microbatches on the sample axis, actions, and each schedule's order of them.

Start reading: microbatches.py, then orders.py.
May import: .
"""
