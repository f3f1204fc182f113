"""From a launcher to ranks that know each other and agree on what they run.

Start reading: command.py, then rendezvous.py and preflight.py.
May import: .
"""
