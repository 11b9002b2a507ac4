"""Attempts as people and tools read them: pages, tables, files."""
