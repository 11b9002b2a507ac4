"""Deployment of trained checkpoints to users: canary, promotion, roll back."""
