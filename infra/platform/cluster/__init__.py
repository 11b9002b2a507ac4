"""Processes: supervised children for heavy work, the start of Ray, and named actors."""
