"""Frozen layers of files, from which snapshots and forks are made."""
