"""Suites of held-out problems, scorecards, statistics and gates."""
