"""`hethub train` on one rank, from the request to the last step.

Start reading: train.py, the run in a line; then steps.py.
May import: spec, kernels, predictor, planner, communicator, runtime.
"""
