"""Several hosts on one machine: network namespaces, a Slurm of two nodes, and what a process listens on.

Start reading: namespaces.py.
May import: tests.support.
"""
