"""How the constants were fitted and how good predictions are: fit, its report, validation.

Start reading: fit.py, then validate.py.
May import: .
"""
