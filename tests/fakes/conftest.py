"""The fake repositories hold tests of their own, which run in the sandbox only."""

collect_ignore = ["repositories"]
