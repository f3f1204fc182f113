"""Process groups: the c10d backend `hethub`, its operations, and the uneven collectives.

Start reading: process_group.py, then operations.py (what each goes through) and backend.py (who makes groups).
May import: spec, kernels, communicator.
"""
