"""Verdicts from tests, decided outside the box."""
