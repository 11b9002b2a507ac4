"""Rows of chunks with their postings and vectors."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ostinato.infra.agent.search.chunk_cache import ChunkFeatures
from ostinato.infra.agent.search.chunks import Chunk
from ostinato.models.search_encoder.code_words import FIELDS


@dataclass(slots=True)
class WordStatistics:
    """BM25 document statistics of many chunks, by field."""

    documents: tuple[Counter[str], ...] = field(
        default_factory=lambda: tuple(Counter() for _ in FIELDS)
    )
    total_words: list[int] = field(default_factory=lambda: [0] * len(FIELDS))
    num_chunks: int = 0

    def add(self, feature: ChunkFeatures) -> None:
        self.num_chunks += 1
        for column, counts in enumerate(feature.counts):
            self.documents[column].update(counts.keys())
            self.total_words[column] += feature.num_words[column]


class Segment:
    """Chunks of many files. Never changed once made."""

    def __init__(
        self, chunks: Sequence[Chunk], features: Sequence[ChunkFeatures], width: int = 0
    ) -> None:
        """`width`: length of a vector, 0 without an encoder."""
        self.chunks, self.features = chunks, features
        self.rows_of_path: defaultdict[str, list[int]] = defaultdict(list)
        self.statistics = WordStatistics()
        self.lengths = np.zeros((len(features), len(FIELDS)))
        self.vectors = np.zeros((len(features), width), dtype=np.float32)
        self._postings: list[dict[str, tuple[list[int], list[int]]]] = [{} for _ in FIELDS]
        self._arrays: dict[tuple[int, str], tuple[np.ndarray, np.ndarray]] = {}
        for row, (chunk, feature) in enumerate(zip(chunks, features, strict=True)):
            self.rows_of_path[chunk.path].append(row)
            self.statistics.add(feature)
            self.lengths[row], self.vectors[row] = feature.num_words, feature.vector
            for postings, counts in zip(self._postings, feature.counts, strict=True):
                for word, count in counts.items():
                    rows, found = postings.setdefault(word, ([], []))
                    rows.append(row)
                    found.append(count)

    def posting(self, column: int, word: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Rows of a field that hold a word, and how often."""
        found = self._postings[column].get(word)
        if found is None:
            return None
        if (column, word) not in self._arrays:
            self._arrays[column, word] = np.array(found[0]), np.array(found[1], dtype=np.float64)
        return self._arrays[column, word]
