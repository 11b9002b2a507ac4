"""The index of a repository, built once. A search applies the changes of a sandbox to it.

Rows of changed files are hidden and their new content is indexed separately, so a search costs only the files that
differ. Word statistics are exact: the ranking is that of an index built with the changes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ostinato.infra.agent.search.chunk_cache import ChunkCache
from ostinato.infra.agent.search.chunks import cut_chunks
from ostinato.infra.agent.search.encoder import BagEncoder, TextEncoder
from ostinato.infra.agent.search.field_scores import (
    ChunkPostings,
    WordStatistics,
    fuse_standardised,
    score_words,
)
from ostinato.models.search_encoder.code_words import split_words

SEARCHED_SUFFIXES = (".py", ".pyi", ".md", ".rst", ".toml", ".txt", ".cfg")
LARGEST_FILE_BYTES = 200_000
_SCORE_DECIMALS = 9  # sums in another order differ beyond these

Files = Mapping[str, bytes | None]
"""Path -> content; None: removed."""


@dataclass(frozen=True, slots=True)
class Hit:
    """One chunk that matched."""

    path: str
    first_line: int
    last_line: int
    title: str
    score: float


class CodeIndex:
    """Searchable repository. Never changed once made."""

    def __init__(self, cache: ChunkCache, files: Files) -> None:
        self._cache = cache
        self._base = self._segment(files)

    def search(self, query: str, limit: int, changes: Files | None = None) -> list[Hit]:
        """The best chunks, best first, equal ones by path and line. Empty if no word or vector matches."""
        changes = changes or {}
        segments = [self._base, self._segment(changes)]
        hidden = WordStatistics()
        is_shown = np.ones(sum(len(segment.chunks) for segment in segments), dtype=bool)
        for path in changes.keys() & self._base.rows_of_path.keys():
            for row in self._base.rows_of_path[path]:
                is_shown[row] = False
                hidden.add(self._base.features[row])
        if not is_shown.any():
            return []
        words = split_words(query)
        parts = [segment.statistics for segment in segments]
        scored = [score_words(segment, words, parts, [hidden]) for segment in segments]
        scores = np.concatenate(scored)[is_shown]
        is_found = scores > 0
        encoder = self._cache.encoder
        vector = np.zeros(0) if encoder is None else encoder.encode_query(query)
        if encoder is not None and vector.any():
            products = np.concatenate([segment.vectors @ vector for segment in segments])[is_shown]
            scores = fuse_standardised(scores, products.astype(np.float64), encoder.dense_weight)
            is_found[:] = True
        return self._best(segments, np.flatnonzero(is_shown)[is_found], scores[is_found], limit)

    def _segment(self, files: Files) -> ChunkPostings:
        chunks = [
            chunk
            for path, content in sorted(files.items())
            if content is not None and is_searched(path, content)
            for chunk in cut_chunks(path, content.decode(errors="replace"))
        ]
        return ChunkPostings(chunks, self._cache.features(chunks), self._cache.width)

    def _best(
        self, segments: list[ChunkPostings], rows: np.ndarray, scores: np.ndarray, limit: int
    ) -> list[Hit]:
        scores = np.round(scores, _SCORE_DECIMALS)
        if limit < len(scores):
            # rows that tie with the last one are kept, so that path and line decide between them
            last = np.partition(scores, len(scores) - limit)[len(scores) - limit]
            rows, scores = rows[scores >= last], scores[scores >= last]
        chunks = [*segments[0].chunks, *segments[1].chunks]
        found = [(chunks[row], float(score)) for row, score in zip(rows, scores, strict=True)]
        hits = [
            Hit(chunk.path, chunk.first_line, chunk.last_line, chunk.title, score)
            for chunk, score in found
        ]
        return sorted(hits, key=lambda hit: (-hit.score, hit.path, hit.first_line))[:limit]


def is_searched(path: str, content: bytes) -> bool:
    """Whether a file is indexed: a text suffix, at most LARGEST_FILE_BYTES, no hidden folder."""
    hidden = any(part.startswith(".") for part in path.split("/"))
    return not hidden and path.endswith(SEARCHED_SUFFIXES) and len(content) <= LARGEST_FILE_BYTES


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
        """The best chunks of the pristine repository with `changes` applied."""
        index = self.service.index_of(self.repository_id, self.files)
        return index.search(query, limit, changes)
