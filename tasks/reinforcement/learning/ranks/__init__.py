"""Processes that share an optimiser step."""
