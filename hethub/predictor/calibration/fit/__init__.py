"""The constants fitted on measured layers, then on measured steps: `python -m hethub.predictor.calibration.fit`.

Start reading: __main__.py, then layers.py and steps.py.
May import: spec, predictor.
"""
