"""What ranks measure: their layers and links, their largest batch, who is slower than planned.

Start reading: profiler.py, then autotune.py and straggler.py.
May import: spec, kernels, predictor, planner, communicator, runtime.
"""
