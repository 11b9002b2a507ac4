"""Search over the text of a repository."""

from ostinato.infra.agent.search.bm25 import Hit, search_files

__all__ = ["Hit", "search_files"]
