"""Boxes on this host: bubblewrap, limits, the connection to the agent inside, and the backend."""
