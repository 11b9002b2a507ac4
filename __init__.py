"""Ostinato trains a coding agent. The root of the repository is this package: `ostinato.flows` is `flows/`."""
