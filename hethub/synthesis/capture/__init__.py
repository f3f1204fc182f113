"""What a module computes in a step, as a graph of operators: traced, in a form that ranks can share, and proved.

Start reading: trace.py, then proof.py.
May import: synthesis.graph, spec.errors.
"""
