"""Ostinato: trains a coding agent. The five folders of the repository are linked here, so that all code has one import name."""
