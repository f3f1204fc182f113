"""Predictions beside measurements: `hethub validate`.

Start reading: validate.py, then errors.py.
May import: .
"""
