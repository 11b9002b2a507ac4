"""Training loop, its data, losses and optimiser."""
