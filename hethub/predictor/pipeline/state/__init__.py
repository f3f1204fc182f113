"""What keeps the training state of replicas in step: sums of gradients, gathers of weights, copies between host and device.

Start reading: costs.py, then rings.py.
May import: spec, predictor.cost, predictor.memory, predictor.pipeline.overlap.
"""
