"""Where bytes cross vendors: collectives and messages between islands, through host memory.

Start reading: collectives.py, then messages.py.
May import: .
"""
