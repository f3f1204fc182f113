"""The costs of keeping replicas' training state in step: sums of gradients, gathers of weights, copies to and from the host.

Start reading: costs.py, then rings.py.
May import: spec, predictor.cost, predictor.memory, predictor.pipeline.overlap.
"""
