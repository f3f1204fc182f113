"""Training under a program of HAP: any module that returns its loss, from a job file to the last step.

Start reading: train.py, the run in a line; then subject.py and trainer.py.
May import: spec, communicator, kernels.device, predictor.cost, synthesis, runtime.
"""
