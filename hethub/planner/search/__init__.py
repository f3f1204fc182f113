"""`auto`: what is generated, estimated, evaluated and improved, in which order.

Start reading: auto.py, then local_search.py.
May import: planner.
"""
