"""GRPO without its biases: graded groups in, one optimiser step out, new weights on the chain."""
