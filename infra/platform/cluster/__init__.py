"""Processes: supervised children for heavy work, Ray start-up and named actors."""
