"""Boxes for agents' commands and for verdicts: no network, no host files, limits on everything."""
