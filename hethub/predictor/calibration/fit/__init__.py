"""The constants fitted on measured layers, on measured collectives, then on measured steps: `python -m hethub.predictor.calibration.fit`.

Start reading: __main__.py, then layers.py, links.py and steps.py.
May import: predictor.
"""
