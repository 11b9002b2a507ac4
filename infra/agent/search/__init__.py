"""Search over the code of a repository."""
