"""Where boxes of many nodes are asked for, placed, leased, watched and taken back.

The policy (`scheduler.py` and what it imports) is pure: time and randomness come in as arguments, so
the simulator runs the same code as the service.
"""
