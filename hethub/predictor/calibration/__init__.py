"""How the constants were fitted on measurements, and how far predictions are off.

Start reading: evaluate.py, then fit/ and validation/.
May import: predictor.cost, predictor.memory, predictor.pipeline.
"""
