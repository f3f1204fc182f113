"""Keeps pytest out of the doorways: links to packages, whose modules it would otherwise meet under a second name."""

collect_ignore = ["communicator", "predictor", "planner", "kernels"]
