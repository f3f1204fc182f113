"""A plan bound to its model and cluster: tensors, training state, shares, and every rank's actions.

Start reading: bind.py, then state.py.
May import: spec.accelerator, spec.cluster, spec.errors, spec.model, spec.plan, spec.ranges, spec.schedule.
"""
