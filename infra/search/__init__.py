"""Search over the text of a repository."""

from infra.search.bm25 import Hit, search_files

__all__ = ["Hit", "search_files"]
