"""Attention: of causal rows, latent heads, rows with common beginnings."""
