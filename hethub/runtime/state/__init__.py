"""Training state on one rank: parameters, gradients, the optimizer, their sums over ranks, ZeRO.

Start reading: storage.py, then optimizer.py and reduction.py.
May import: spec, kernels, communicator, runtime.json_hash, runtime.memory, runtime.pace.
"""
