"""Rows of chunks with their postings and vectors: the unit an index is made of.

Rows are only ever appended; a removed file's rows become tombstones. It does not choose, fuse or
order hits. A frozen segment is shared by any number of indexes.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ostinato.infra.agent.search.chunk_cache import ChunkFeatures
from ostinato.infra.agent.search.chunks import Chunk
from ostinato.models.code_words import FIELDS

_FIRST_CAPACITY_ROWS = 64


@dataclass(slots=True)
class WordStatistics:
    """BM25 document statistics of many chunks, by field."""

    documents: tuple[Counter[str], ...] = field(
        default_factory=lambda: tuple(Counter() for _ in FIELDS)
    )
    total_words: list[int] = field(default_factory=lambda: [0] * len(FIELDS))
    num_chunks: int = 0

    def add(self, feature: ChunkFeatures) -> None:
        """Counts a chunk."""
        self.num_chunks += 1
        for column, counts in enumerate(feature.counts):
            self.documents[column].update(counts.keys())
            self.total_words[column] += feature.num_words[column]

    def remove(self, feature: ChunkFeatures) -> None:
        """Takes a counted chunk out again."""
        self.num_chunks -= 1
        for column, counts in enumerate(feature.counts):
            documents = self.documents[column]
            for word in counts:
                documents[word] -= 1
                if not documents[word]:
                    del documents[word]
            self.total_words[column] -= feature.num_words[column]

    def copy(self) -> "WordStatistics":
        """Independent of this one."""
        documents = tuple(counts.copy() for counts in self.documents)
        return WordStatistics(documents, list(self.total_words), self.num_chunks)


class Segment:
    """Chunks of many files."""

    def __init__(self, width: int) -> None:
        self.chunks: list[Chunk] = []
        self.features: list[ChunkFeatures] = []
        self.rows_of_path: dict[str, range] = {}
        self.statistics = WordStatistics()
        self._alive = np.zeros(_FIRST_CAPACITY_ROWS, dtype=bool)
        self._lengths = np.zeros((_FIRST_CAPACITY_ROWS, len(FIELDS)))
        self._vectors = np.zeros((_FIRST_CAPACITY_ROWS, width), dtype=np.float32)
        self._postings: list[dict[str, tuple[list[int], list[int]]]] = [{} for _ in FIELDS]
        self._arrays: list[dict[str, tuple[np.ndarray, np.ndarray]]] = [{} for _ in FIELDS]

    @property
    def num_rows(self) -> int:
        """Rows, tombstones included."""
        return len(self.chunks)

    @property
    def num_alive(self) -> int:
        """Rows without tombstones."""
        return self.statistics.num_chunks

    @property
    def alive(self) -> np.ndarray:
        """Mask over rows. Not to be written."""
        return self._alive[: self.num_rows]

    @property
    def vectors(self) -> np.ndarray:
        """Vectors by row. Not to be written."""
        return self._vectors[: self.num_rows]

    def lengths(self, column: int) -> np.ndarray:
        """Words of a field by row. Not to be written."""
        return self._lengths[: self.num_rows, column]

    def add_file(
        self, path: str, chunks: Sequence[Chunk], features: Sequence[ChunkFeatures]
    ) -> None:
        """Appends a file's chunks. What the path held before becomes tombstones."""
        self.remove_file(path)
        first = self.num_rows
        self._reserve(first + len(chunks))
        for row, (chunk, feature) in enumerate(zip(chunks, features, strict=True), start=first):
            self.chunks.append(chunk)
            self.features.append(feature)
            self.statistics.add(feature)
            self._alive[row] = True
            self._lengths[row] = feature.num_words
            self._vectors[row] = feature.vector
            for column, counts in enumerate(feature.counts):
                self._add_postings(column, row, counts)
        self.rows_of_path[path] = range(first, self.num_rows)

    def _add_postings(self, column: int, row: int, counts: Mapping[str, int]) -> None:
        postings, arrays = self._postings[column], self._arrays[column]
        for word, count in counts.items():
            rows, found = postings.setdefault(word, ([], []))
            rows.append(row)
            found.append(count)
            arrays.pop(word, None)

    def remove_file(self, path: str) -> None:
        """Buries a file's rows. Nothing when there are none."""
        for row in self.rows_of_path.pop(path, range(0)):
            self._alive[row] = False
            self.statistics.remove(self.features[row])

    def posting(self, column: int, word: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Rows of a field that hold a word, tombstones included, and how often."""
        arrays = self._arrays[column]
        if word not in arrays:
            found = self._postings[column].get(word)
            if found is None:
                return None
            arrays[word] = np.array(found[0]), np.array(found[1], dtype=np.float64)
        return arrays[word]

    def copy_files(self, paths: Iterable[str], target: "Segment") -> None:
        """Adds files of this segment to another. Nothing is cut or encoded again."""
        for path in paths:
            rows = self.rows_of_path[path]
            chunks, features = self.chunks[rows.start : rows.stop], self.features
            target.add_file(path, chunks, features[rows.start : rows.stop])

    def _reserve(self, num_rows: int) -> None:
        if num_rows <= len(self._alive):
            return
        more = max(num_rows, 2 * len(self._alive)) - len(self._alive)
        self._alive = np.pad(self._alive, (0, more))
        self._lengths = np.pad(self._lengths, ((0, more), (0, 0)))
        self._vectors = np.pad(self._vectors, ((0, more), (0, 0)))
