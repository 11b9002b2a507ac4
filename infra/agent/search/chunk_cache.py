"""Words and vectors of chunks of code, computed once per text."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from cachetools import LRUCache

from ostinato.infra.agent.search.chunks import Chunk
from ostinato.infra.agent.search.encoder import TextEncoder
from ostinato.models.search_encoder.code_words import CodeText, split_words

NO_MODEL = "no-model"


@dataclass(frozen=True, slots=True)
class ChunkFeatures:
    """Features of a chunk for ranking."""

    counts: tuple[Mapping[str, int], ...]
    """Word counts of each field."""
    num_words: tuple[int, ...]
    """Length of each field."""
    vector: np.ndarray  # float32 [width]; width 0 without an encoder


def features_of(text: CodeText, vector: np.ndarray) -> ChunkFeatures:
    """The features of a chunk's text and vector."""
    words = [split_words(part) for part in text]
    counts = tuple(Counter(part) for part in words)
    return ChunkFeatures(counts, tuple(len(part) for part in words), vector)


class ChunkCache:
    """Features by content, the least recently used dropped beyond `max_entries`."""

    def __init__(self, encoder: TextEncoder | None, max_entries: int = 200_000) -> None:
        self.encoder = encoder
        self._features: LRUCache[str, ChunkFeatures] = LRUCache(max_entries)

    @property
    def width(self) -> int:
        """Length of a vector. 0 without an encoder."""
        return 0 if self.encoder is None else self.encoder.width

    def key(self, chunk: Chunk) -> str:
        """Identity of a chunk's features."""
        model_id = NO_MODEL if self.encoder is None else self.encoder.model_id
        digest = hashlib.sha256(model_id.encode())
        for field in chunk.code_text:
            digest.update(f":{len(field)}:".encode())
            digest.update(field.encode())
        return digest.hexdigest()

    def features(self, chunks: Sequence[Chunk]) -> list[ChunkFeatures]:
        """Features of chunks in their order. Only unseen texts are encoded."""
        keys = [self.key(chunk) for chunk in chunks]
        found = {key: self._features[key] for key in keys if key in self._features}
        found |= self._make(
            {key: chunk for key, chunk in zip(keys, chunks, strict=True) if key not in found}
        )
        self._features.update(found)
        return [found[key] for key in keys]

    def _make(self, missing: Mapping[str, Chunk]) -> dict[str, ChunkFeatures]:
        vectors: dict[str, np.ndarray] = {}
        if self.encoder is not None and missing:
            encoded = self.encoder.encode_code([chunk.code_text for chunk in missing.values()])
            vectors.update(zip(missing, encoded, strict=True))
        empty = np.zeros(0, dtype=np.float32)
        return {
            key: features_of(chunk.code_text, vectors.get(key, empty))
            for key, chunk in missing.items()
        }
