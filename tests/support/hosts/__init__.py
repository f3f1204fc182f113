"""Several hosts on one machine: network namespaces, plans over a wire between them, a Slurm of two nodes, and sockets.

Start reading: namespaces.py.
May import: tests.support.
"""
