"""Attention over causal rows, with latent heads, and over rows that share prefixes."""
