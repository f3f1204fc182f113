"""How the constants were fitted on measurements, and how far predictions are off.

Start reading: evaluate.py, then calibrate.py, fit/ and validation/.
May import: spec, predictor.cost, predictor.memory, predictor.pipeline.
"""
