"""The trained encoder at serving time, with numpy only.

`BagEncoder`, a `TextEncoder`, reads the files of models/search_encoder/embedder.py and gives the same vectors.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from safetensors.numpy import load_file

from ostinato.infra.platform.errors import ConfigError
from ostinato.models.search_encoder.code_words import CodeText, Vocabulary, WordBag

WEIGHTS_FILE = "encoder.safetensors"
DESCRIPTION_FILE = "encoder.json"
_EMPTY_NORM = 1e-12


class TextEncoder(Protocol):
    """Encoder of questions and code into comparable unit vectors."""

    @property
    def model_id(self) -> str:
        """Identity of the model, which changes whenever any vector may change."""
        ...

    @property
    def width(self) -> int: ...

    @property
    def dense_weight(self) -> float:
        """Weight of its standardised score relative to BM25's."""
        ...

    def encode_query(self, text: str) -> np.ndarray:
        """One vector [width]."""
        ...

    def encode_code(self, texts: Sequence[CodeText]) -> np.ndarray:
        """Vectors [texts, width]."""
        ...


class BagEncoder:
    """Weighted sum of word vectors."""

    def __init__(self, directory: Path) -> None:
        description = directory / DESCRIPTION_FILE
        if not description.is_file():
            raise ConfigError(f"encoder {directory}: no {DESCRIPTION_FILE}, wanted an encoder")
        weights = directory / WEIGHTS_FILE
        content = json.loads(description.read_text())
        tensors = load_file(weights)
        self.model_id = hashlib.sha256(weights.read_bytes()).hexdigest()[:16]
        self.dense_weight = float(content["metadata"].get("dense_weight", 1.0))
        self.vocabulary = Vocabulary(content["words"], int(content["config"]["num_buckets"]))
        self._vectors_VD = np.concatenate([tensors["vectors_VD"], tensors["bucket_vectors"]])
        self._query_weights = _weight_per_row(tensors["query_log_weights"], self.vocabulary)
        self._code_weights = _weight_per_row(tensors["code_log_weights"], self.vocabulary)
        self._field_scales = np.exp(tensors["field_log_scales"])
        self._query_map_DD = tensors["query_map_DD"]

    @property
    def width(self) -> int:
        return int(self._vectors_VD.shape[1])

    def encode_query(self, text: str) -> np.ndarray:
        bag = self.vocabulary.bag_of_query(text)
        return _unit(self._sum(bag, self._query_weights) @ self._query_map_DD)

    def encode_code(self, texts: Sequence[CodeText]) -> np.ndarray:
        """Unit vectors [texts, width]."""
        vectors = np.zeros((len(texts), self.width), dtype=np.float32)
        for row, text in enumerate(texts):
            bag = self.vocabulary.bag_of_code(text)
            vectors[row] = _unit(self._sum(bag, self._code_weights))
        return vectors

    def _sum(self, bag: WordBag, weights_V: np.ndarray) -> np.ndarray:
        factors = np.log1p(bag.counts) @ self._field_scales
        return (weights_V[bag.ids] * factors) @ self._vectors_VD[bag.ids]


def _weight_per_row(log_weights: np.ndarray, vocabulary: Vocabulary) -> np.ndarray:
    """Weights of known words and buckets. All buckets share the last weight."""
    known = np.exp(log_weights[:-1])
    buckets = np.full(vocabulary.num_buckets, np.exp(log_weights[-1]), dtype=np.float32)
    return np.concatenate([known, buckets]).astype(np.float32)


def _unit(vector: np.ndarray) -> np.ndarray:
    norm = float(np.linalg.norm(vector))
    return vector / norm if norm > _EMPTY_NORM else np.zeros_like(vector)
