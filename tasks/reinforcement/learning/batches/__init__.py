"""Conversion of graded groups to packed samples with advantages."""
