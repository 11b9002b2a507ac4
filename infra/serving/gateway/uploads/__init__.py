"""Repositories that clients send, kept for their tenant alone."""
