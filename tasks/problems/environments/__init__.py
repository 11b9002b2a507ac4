"""Environments of installed packages: their problems join those that are judged by tests."""
