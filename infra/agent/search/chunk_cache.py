"""What is computed once for a text and kept: its words and its vector.

The vectors can be written to one file and read back, so that a restart embeds nothing again. It
knows neither files nor repositories.
"""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from ostinato.infra.agent.search.chunks import Chunk
from ostinato.infra.agent.search.encoder import TextEncoder
from ostinato.models.code_words import CodeText, split_words

NO_MODEL = "no-model"


@dataclass(frozen=True, slots=True)
class ChunkFeatures:
    """A chunk made ready for ranking."""

    counts: tuple[Mapping[str, int], ...]
    """Words of each field."""
    num_words: tuple[int, ...]
    """Length of each field."""
    vector: np.ndarray  # float32 [width]; width 0 without an encoder


def describe_text(text: CodeText, vector: np.ndarray) -> ChunkFeatures:
    """The words of a piece of code, with its vector."""
    words = [split_words(part) for part in text]
    counts = tuple(Counter(part) for part in words)
    return ChunkFeatures(counts, tuple(len(part) for part in words), vector)


class ChunkCache:
    """Features by content, the least recently used dropped beyond `max_entries`."""

    def __init__(self, encoder: TextEncoder | None, max_entries: int = 200_000) -> None:
        self.encoder = encoder
        self.num_encoded = 0
        self._max_entries = max_entries
        self._features: OrderedDict[str, ChunkFeatures] = OrderedDict()
        self._vectors: dict[str, np.ndarray] = {}  # read from a file, not yet asked for

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
        missing = {
            key: chunk for key, chunk in zip(keys, chunks, strict=True) if key not in self._features
        }
        found = {key: self._features[key] for key in keys if key in self._features}
        found.update(self._make(missing))
        for key in keys:
            self._features[key] = found[key]
            self._features.move_to_end(key)
        while len(self._features) > self._max_entries:
            self._features.popitem(last=False)
        return [found[key] for key in keys]

    def _make(self, missing: Mapping[str, Chunk]) -> dict[str, ChunkFeatures]:
        unknown = [key for key in missing if key not in self._vectors]
        vectors = {key: self._vectors[key] for key in missing if key in self._vectors}
        if self.encoder is not None and unknown:
            encoded = self.encoder.encode_code([missing[key].code_text for key in unknown])
            vectors.update(zip(unknown, encoded, strict=True))
            self.num_encoded += len(unknown)
        empty = np.zeros(0, dtype=np.float32)
        return {
            key: describe_text(chunk.code_text, vectors.get(key, empty))
            for key, chunk in missing.items()
        }

    def save(self, path: Path) -> None:
        """Writes the vectors, replacing the file at once."""
        keys = sorted(self._features)
        vectors = np.zeros((len(keys), self.width), dtype=np.float32)
        for row, key in enumerate(keys):
            vectors[row] = self._features[key].vector
        digests = np.frombuffer(bytes.fromhex("".join(keys)), dtype=np.uint8).reshape(-1, 32)
        partial = path.with_suffix(".partial")
        save_file({"keys": digests, "vectors": vectors}, partial)
        partial.replace(path)

    def load(self, path: Path) -> None:
        """Takes up vectors that an earlier process saved. Those of another model never match."""
        tensors = load_file(path)
        keys = (row.tobytes().hex() for row in tensors["keys"])
        if tensors["vectors"].shape[1] == self.width:
            self._vectors.update(zip(keys, tensors["vectors"], strict=True))
