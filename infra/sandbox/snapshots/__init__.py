"""Frozen layers of files: what snapshots and forks are made of."""
