"""Boxes on all machines of a Ray cluster: one node per machine lends them, holders choose a node."""
