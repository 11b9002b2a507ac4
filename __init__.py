"""Ostinato: trains a coding agent. The repository's root is this package; its folders are imported as `ostinato.flows` and so on."""
