"""An encoder without training: hashed words, so that vectors are real and cheap."""

from collections.abc import Sequence

import numpy as np

from ostinato.models.search_encoder.code_words import CodeText, Vocabulary


class HashedEncoder:
    """Counts of words in few buckets."""

    model_id = "hashed"
    dense_weight = 0.5
    width = 16

    def __init__(self) -> None:
        self._vocabulary = Vocabulary([], self.width)
        self.encoded: list[CodeText] = []

    def encode_query(self, text: str) -> np.ndarray:
        return self._vector(CodeText("", "", "", text))

    def encode_code(self, texts: Sequence[CodeText]) -> np.ndarray:
        self.encoded += texts
        return np.stack([self._vector(text) for text in texts])

    def _vector(self, text: CodeText) -> np.ndarray:
        bag = self._vocabulary.bag_of_code(text)
        vector = np.zeros(self.width, dtype=np.float32)
        vector[bag.ids] = bag.counts.sum(axis=1)
        norm = np.linalg.norm(vector)
        return vector / norm if norm else vector
