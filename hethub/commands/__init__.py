"""The commands by theme: what each takes on the command line, and the few calls that do it.

Start reading: common.py, then train.py.
May import: spec, predictor, planner, capacity, communicator, runtime, report.
"""
