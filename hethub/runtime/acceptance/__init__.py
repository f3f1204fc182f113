"""`hethub doctor --acceptance`: whether machines with their devices communicate, compute and train as they should.

Start reading: acceptance.py, then exchange.py and training.py.
May import: spec, kernels, predictor, communicator, runtime.
"""
