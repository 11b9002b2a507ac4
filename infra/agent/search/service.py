"""Code search for all sandboxes of a process: an index per repository."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ostinato.infra.agent.search.chunk_cache import ChunkCache
from ostinato.infra.agent.search.encoder import BagEncoder, TextEncoder
from ostinato.infra.agent.search.index import CodeIndex, Files, Hit


class SearchService:
    """Indexes of a process. Belongs to one event loop or thread."""

    def __init__(self, encoder: TextEncoder | None) -> None:
        self.cache = ChunkCache(encoder)
        self._indexes: dict[str, CodeIndex] = {}

    @classmethod
    def load(cls, encoder_directory: str | None) -> "SearchService":
        """A service with a trained encoder's files. None: BM25 by field alone."""
        return cls(None if encoder_directory is None else BagEncoder(Path(encoder_directory)))

    def index_of(self, repository_id: str, files: Mapping[str, bytes]) -> CodeIndex:
        """The index of a pristine repository, built when it is first asked for."""
        if repository_id not in self._indexes:
            self._indexes[repository_id] = CodeIndex(self.cache, files)
        return self._indexes[repository_id]


@dataclass(frozen=True, slots=True)
class LocalSearch:
    """View of one sandbox on the service. The repository is indexed at its first search."""

    service: SearchService
    repository_id: str
    files: Mapping[str, bytes]  # of the pristine repository

    def search(self, changes: Files, query: str, limit: int) -> list[Hit]:
        """The best chunks of the pristine repository with `changes` laid over it."""
        index = self.service.index_of(self.repository_id, self.files)
        return index.search(query, limit, changes)
