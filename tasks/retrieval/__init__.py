"""Trains and measures the code-search encoder."""
