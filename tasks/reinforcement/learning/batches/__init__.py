"""From graded groups to packed samples with advantages."""
