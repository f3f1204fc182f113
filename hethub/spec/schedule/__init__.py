"""The order of work: microbatches on the sample axis, actions, and each schedule's order of them.

Start reading: microbatches.py, then in_flight.py and orders.py.
May import: spec.errors, spec.plan, spec.ranges.
"""
