"""The index of one state of a repository: built once, then moved along with every edit.

An index is a stack of frozen segments that it shares with its forks, and one segment of its own on
top; a file that changed hides its rows below. So a sandbox fork costs its changed files, and an
edit costs one file. Word statistics are exact whatever the stack: an index that was moved ranks as
one that was built anew.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ostinato.infra.agent.search.chunk_cache import ChunkCache
from ostinato.infra.agent.search.chunks import Chunk, cut_chunks
from ostinato.infra.agent.search.field_scores import score_words
from ostinato.infra.agent.search.fusion import fuse_standardised
from ostinato.infra.agent.search.segment import Segment, WordStatistics
from ostinato.models.code_words import split_words

MOST_LAYERS = 8
_SCORE_DECIMALS = 9  # sums in another order differ beyond these


@dataclass(frozen=True, slots=True)
class Hit:
    """One chunk that matched."""

    path: str
    first_line: int
    last_line: int
    title: str
    score: float


@dataclass(slots=True)
class _Layer:
    """Frozen segment as seen by one index."""

    segment: Segment
    visible: np.ndarray
    hidden_paths: set[str] = field(default_factory=set)
    hidden: WordStatistics = field(default_factory=WordStatistics)

    @classmethod
    def over(cls, segment: Segment) -> "_Layer":
        return cls(segment, segment.alive.copy())

    def copy(self) -> "_Layer":
        return _Layer(self.segment, self.visible.copy(), set(self.hidden_paths), self.hidden.copy())

    def hide(self, path: str) -> None:
        if path in self.hidden_paths or path not in self.segment.rows_of_path:
            return
        self.hidden_paths.add(path)
        for row in self.segment.rows_of_path[path]:
            self.visible[row] = False
            self.hidden.add(self.segment.features[row])

    def shown_paths(self) -> list[str]:
        return [path for path in self.segment.rows_of_path if path not in self.hidden_paths]


class CodeIndex:
    """Searchable state of one repository."""

    def __init__(self, cache: ChunkCache) -> None:
        self._hashes: dict[str, bytes] = {}  # of the files as indexed
        self._cache = cache
        self._layers: list[_Layer] = []
        self._own = Segment(cache.width)

    @classmethod
    def build(cls, cache: ChunkCache, files: Mapping[str, bytes]) -> "CodeIndex":
        """An index of these files."""
        index = cls(cache)
        index.update(files)
        return index

    @property
    def num_chunks(self) -> int:
        """Chunks that can be found."""
        return self._own.num_alive + sum(
            layer.segment.num_alive - layer.hidden.num_chunks for layer in self._layers
        )

    def update(self, changes: Mapping[str, bytes | None]) -> int:
        """Sets files, or removes them where the content is None. Returns how many differed."""
        changed = 0
        for path, content in sorted(changes.items()):
            if not self._note(path, content):
                continue
            changed += 1
            for layer in self._layers:
                layer.hide(path)
            if content is None:
                self._own.remove_file(path)
            else:
                chunks = cut_chunks(path, content.decode(errors="replace"))
                self._own.add_file(path, chunks, self._cache.features(chunks))
        if self._own.num_rows > 64 and self._own.num_rows > 2 * self._own.num_alive:
            self._own = self._merged([_Layer.over(self._own)])
        return changed

    def _note(self, path: str, content: bytes | None) -> bool:
        """Whether a file's content is another than the indexed one."""
        known = self._hashes.pop(path, None)
        if content is None:
            return known is not None
        self._hashes[path] = hashlib.sha256(content).digest()
        return self._hashes[path] != known

    def fork(self) -> "CodeIndex":
        """An index of the same state that goes its own way. Chunks and vectors are shared."""
        if self._own.num_alive:
            self._layers.append(_Layer.over(self._own))
            if len(self._layers) > MOST_LAYERS:
                self._layers = [_Layer.over(self._merged(self._layers))]
        self._own = Segment(self._cache.width)
        other = CodeIndex(self._cache)
        other._hashes = dict(self._hashes)
        other._layers = [layer.copy() for layer in self._layers]
        return other

    def _merged(self, layers: list[_Layer]) -> Segment:
        segment = Segment(self._cache.width)
        for layer in layers:
            layer.segment.copy_files(layer.shown_paths(), segment)
        return segment

    def search(self, query: str, limit: int) -> list[Hit]:
        """The best chunks, best first. Equal scores by path and line. Nothing when no word of the
        query and no vector says anything.
        """
        layers = [*self._layers, _Layer.over(self._own)]
        masks = np.concatenate([layer.visible for layer in layers])
        if not masks.any():
            return []
        lexical = self._lexical(query, layers)[masks]
        dense = self._dense(query, layers, masks)
        scores, found = lexical, lexical > 0
        if dense is not None and self._cache.encoder is not None:
            scores = fuse_standardised(lexical, dense, self._cache.encoder.dense_weight)
            found = np.ones(len(dense), dtype=bool)
        return self._best(layers, np.flatnonzero(masks), scores, found, limit)

    def _lexical(self, query: str, layers: list[_Layer]) -> np.ndarray:
        words = split_words(query)
        parts = [layer.segment.statistics for layer in layers]
        hidden = [layer.hidden for layer in layers]
        return np.concatenate(
            [score_words(layer.segment, words, parts, hidden) for layer in layers]
        )

    def _dense(self, query: str, layers: list[_Layer], masks: np.ndarray) -> np.ndarray | None:
        """Products of the query's vector with every visible one. None when it has no vector."""
        if self._cache.encoder is None:
            return None
        vector = self._cache.encoder.encode_query(query)
        if not vector.any():
            return None
        products = [layer.segment.vectors @ vector for layer in layers]
        return np.concatenate(products)[masks].astype(np.float64)

    def _best(
        self,
        layers: list[_Layer],
        rows: np.ndarray,
        scores: np.ndarray,
        found: np.ndarray,
        limit: int,
    ) -> list[Hit]:
        rows, scores = rows[found], np.round(scores[found], _SCORE_DECIMALS)
        if limit < len(scores):
            # all that tie with the last one stay in, so that ties are settled by path and line
            last = np.partition(scores, len(scores) - limit)[len(scores) - limit]
            rows, scores = rows[scores >= last], scores[scores >= last]
        starts = np.cumsum([0, *(layer.segment.num_rows for layer in layers)])
        hits: list[Hit] = []
        for row, score in zip(rows, scores, strict=True):
            number = int(np.searchsorted(starts, row, side="right")) - 1
            chunk = layers[number].segment.chunks[int(row - starts[number])]
            hits.append(_hit(chunk, float(score)))
        return sorted(hits, key=lambda hit: (-hit.score, hit.path, hit.first_line))[:limit]


def _hit(chunk: Chunk, score: float) -> Hit:
    return Hit(chunk.path, chunk.first_line, chunk.last_line, chunk.title, score)
