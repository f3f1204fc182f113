"""From a launcher to ranks that know each other and agree on what they run.

Start reading: launcher_command.py, then rendezvous.py and preflight.py.
May import: spec, kernels, communicator, runtime.json_hash, runtime.memory.
"""
