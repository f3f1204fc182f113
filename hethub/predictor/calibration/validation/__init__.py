"""Predictions beside measurements: `hethub validate`.

Start reading: validate.py, then errors.py.
May import: spec, predictor.calibration.evaluate, predictor.calibration.sources, predictor.cost, predictor.predict.
"""
