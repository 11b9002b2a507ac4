"""Boxes of many nodes: where they are placed, who holds them, when they end.

The policy (`scheduler.py` and what it imports) is pure: time and randomness come in as arguments.
"""
