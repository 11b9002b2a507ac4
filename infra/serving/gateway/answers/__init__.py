"""Answers of served models: chat completions and agent sessions."""
