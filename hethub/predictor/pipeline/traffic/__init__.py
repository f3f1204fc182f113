"""What a plan sends over links: which it passes, how many samples, and the pace at which messages share them.

Start reading: link_loads.py, then routes.py.
May import: spec, predictor.cost, predictor.memory, predictor.pipeline.state.costs.
"""
