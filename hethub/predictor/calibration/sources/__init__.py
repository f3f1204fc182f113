"""Published measurements as cases that the predictor can price.

Start reading: tables.py.
May import: .
"""
