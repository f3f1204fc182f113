"""Which cluster to buy or rent: sizes, prices and deadlines for a number of tokens.

Start reading: sizing.py.
May import: .
"""
