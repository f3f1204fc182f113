"""Process groups: the c10d backend `hethub`, its operations, and the uneven collectives.

Start reading: backend.py, then process_group.py.
May import: .
"""
