"""Encoder of code search."""
