"""Postings of chunks, and BM25 by field over them: the name of a definition counts more than its body.

Plain BM25 is the same with weight on the body only. Postings are scored per query, because the changes of a sandbox
hide rows and add others; libraries such as bm25s score a fixed collection when they index it.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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


class ChunkPostings:
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


class FieldRule(NamedTuple):
    """BM25 parameters of one field."""

    weight: float
    saturation: float
    length_normalisation: float
    coverage: float = 0.0
    """Score added for the share of the field's words that are in the question."""


# Chosen on 1,624 questions of 16 packages that the benchmark does not measure on: 0.580 with weights 0.5, 1.5, 0.5, 1 and
# no coverage, 0.593 with these. A name that the question contains whole ranks above one that it contains in part.
BY_FIELD = (
    FieldRule(1.0, 0.5, 0.5),  # scope
    FieldRule(1.0, 0.5, 0.5, coverage=4.0),  # name
    FieldRule(0.75, 1.5, 0.75),  # head
    FieldRule(1.0, 1.5, 0.75),  # body
)
BODY_ONLY = (
    FieldRule(0.0, 1.5, 0.75),
    FieldRule(0.0, 1.5, 0.75),
    FieldRule(0.0, 1.5, 0.75),
    FieldRule(1.0, 1.5, 0.75),
)


def score_words(
    segment: ChunkPostings,
    words: Iterable[str],
    parts: Sequence[WordStatistics],
    hidden: Sequence[WordStatistics] = (),
    rules: Sequence[FieldRule] = BY_FIELD,
) -> np.ndarray:
    """Score of every row. The index holds `parts` without `hidden`."""
    scores = np.zeros(len(segment.chunks))
    wanted = sorted(set(words))
    num_chunks = sum(part.num_chunks for part in parts) - sum(part.num_chunks for part in hidden)
    for column, rule in enumerate(rules):
        if rule.coverage:
            scores += rule.coverage * _covered_shares(segment, column, wanted)
        if not rule.weight or not num_chunks:
            continue
        total = sum(part.total_words[column] for part in parts)
        total -= sum(part.total_words[column] for part in hidden)
        lengths = segment.lengths[:, column] * (num_chunks / max(total, 1))
        norms = rule.saturation * (
            1 - rule.length_normalisation + rule.length_normalisation * lengths
        )
        for word in wanted:
            containing = sum(part.documents[column].get(word, 0) for part in parts)
            containing -= sum(part.documents[column].get(word, 0) for part in hidden)
            posting = segment.posting(column, word) if containing else None
            if posting is not None:
                rows, counts = posting
                rarity = math.log(1 + (num_chunks - containing + 0.5) / (containing + 0.5))
                gain = counts * (rule.saturation + 1) / (counts + norms[rows])
                scores[rows] += rule.weight * rarity * gain
    return scores


def _covered_shares(segment: ChunkPostings, column: int, words: Iterable[str]) -> np.ndarray:
    """Share of each row's field that the question covers, 0..1."""
    covered = np.zeros(len(segment.chunks))
    for word in words:
        posting = segment.posting(column, word)
        if posting is not None:
            rows, counts = posting
            covered[rows] += counts
    return covered / np.maximum(segment.lengths[:, column], 1.0)


def fuse_standardised(lexical: np.ndarray, dense: np.ndarray, dense_weight: float) -> np.ndarray:
    """Sum of z-scores, the second times `dense_weight`. Scores that are all equal count nothing."""
    return _standardised(lexical) + dense_weight * _standardised(dense)


def _standardised(scores: np.ndarray) -> np.ndarray:
    if not len(scores):
        return scores
    deviation = scores.std()
    if deviation <= 1e-9 * max(1.0, float(np.abs(scores).max())):
        return np.zeros_like(scores)
    return (scores - scores.mean()) / deviation
