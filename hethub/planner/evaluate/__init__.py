"""Candidates bound and predicted with full cost, each once.

Start reading: evaluator.py.
May import: .
"""
