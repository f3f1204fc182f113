"""What runs a plan: launch, data, model, executor, optimizer, checkpoints.

Start reading: loop/train.py.
May import: spec, kernels, communicator.
"""
