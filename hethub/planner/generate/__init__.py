"""Where candidates come from.

Start reading: families/, then cuts.py.
May import: .
"""
