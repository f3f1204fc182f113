"""One step's actions on one rank: microbatches through layers, forward and back, and messages between stages.

Start reading: executor.py, then itinerary.py and passes.py.
May import: spec, kernels.device, predictor, communicator, runtime.memory, runtime.model, runtime.pace, runtime.state.
"""
