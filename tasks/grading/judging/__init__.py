"""Verdict of tests, decided outside the box."""
