"""`hethub train` on one rank, from the request to the last step.

Start reading: train.py.
May import: .
"""
