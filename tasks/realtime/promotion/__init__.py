"""What stands between a trained checkpoint and users: gate, canary, promotion, roll back."""
