"""Ranks passages of files against a query with BM25 (k1 = 1.5, b = 0.75).

Files as text in, the best passages out. Splitting is cached by content, so a search after an edit
splits one file again.
"""

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass

from ostinato.infra.agent.search.passages import Passage, split_passages, split_terms

TERM_SATURATION = 1.5
LENGTH_NORMALISATION = 0.75


@dataclass(frozen=True, slots=True)
class Hit:
    """One passage that matched."""

    path: str
    first_line: int
    last_line: int
    title: str
    score: float


def search_files(files: Mapping[str, str], query: str, limit: int) -> list[Hit]:
    """The `limit` best passages, best first. Equal scores by path and line."""
    passages = [(path, passage) for path in files for passage in split_passages(files[path])]
    if not passages:
        return []
    mean_terms = sum(passage.num_terms for _, passage in passages) / len(passages)
    weights = {
        term: _term_weight(sum(term in passage.terms for _, passage in passages), len(passages))
        for term in set(split_terms(query))
    }
    scored = [
        (_score(passage, weights, mean_terms or 1.0), path, passage) for path, passage in passages
    ]
    best = heapq.nsmallest(
        limit,
        (item for item in scored if item[0] > 0),
        key=lambda item: (-item[0], item[1], item[2].first_line),
    )
    return [
        Hit(path, passage.first_line, passage.last_line, passage.title, score)
        for score, path, passage in best
    ]


def _term_weight(num_containing: int, num_passages: int) -> float:
    return math.log(1 + (num_passages - num_containing + 0.5) / (num_containing + 0.5))


def _score(passage: Passage, weights: Mapping[str, float], mean_terms: float) -> float:
    length = 1 - LENGTH_NORMALISATION + LENGTH_NORMALISATION * passage.num_terms / mean_terms
    score = 0.0
    for term, weight in weights.items():
        count = passage.terms.get(term, 0)
        score += weight * count * (TERM_SATURATION + 1) / (count + TERM_SATURATION * length)
    return score
