"""Networks on Megatron-core, and their weights by canonical name."""
