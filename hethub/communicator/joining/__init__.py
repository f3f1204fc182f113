"""How ranks become a world: where they meet, what must be equal, which islands there are, who is alive.

Start reading: rendezvous.py, then islands.py, watch.py and hub.py.
May import: spec.
"""
