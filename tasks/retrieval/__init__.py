"""Training and measurement of the code-search encoder."""
