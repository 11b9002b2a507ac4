"""Boxes on all machines of a Ray cluster: one node per machine leases them, and each client chooses a node."""
