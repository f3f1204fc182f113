"""`auto`: what is generated, estimated, evaluated and improved, in which order.

Start reading: auto.py.
May import: spec, planner.
"""
