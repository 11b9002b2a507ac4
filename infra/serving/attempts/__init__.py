"""Attempts by programs that others wrote. Each runs in a box and asks its own session for answers."""
