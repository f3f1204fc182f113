"""Which cluster to buy or rent: sizes, prices and deadlines for a number of tokens.

Start reading: sizing.py, then options.py and catalogue.py.
May import: spec, predictor.
"""
