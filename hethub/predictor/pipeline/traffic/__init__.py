"""What a plan sends over links: which links messages pass, how many bytes, and at which pace messages share a link.

Start reading: link_loads.py, then routes.py.
May import: spec, predictor.cost, predictor.memory, predictor.pipeline.state.costs.
"""
