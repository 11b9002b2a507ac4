"""Reciprocal ranks of the right chunk over pools of held-out functions, computed with the code of serving."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ostinato.infra.agent.search.chunk_cache import features_of
from ostinato.infra.agent.search.chunks import Chunk
from ostinato.infra.agent.search.field_scores import (
    BODY_ONLY,
    BY_FIELD,
    ChunkPostings,
    FieldRule,
    fuse_standardised,
    score_words,
)
from ostinato.models.search_encoder.code_words import CodeText, split_words
from ostinato.models.search_encoder.embedder import Embedder
from ostinato.tasks.retrieval.config import PairsConfig, RankingScores
from ostinato.tasks.retrieval.pairs import IndexedFunction

UNMEASURED_DENSE_WEIGHT = 0.5
DENSE_WEIGHTS = (0.0, 0.2, 0.35, 0.5, 0.7, 1.0, 1.4)


@dataclass(frozen=True, slots=True)
class CandidatePool:
    """Chunks of a package, and questions about them."""

    name: str
    codes: tuple[CodeText, ...]
    queries: tuple[str, ...]
    answers: tuple[int, ...]
    """Parallel to queries: index in codes."""


def make_pool(
    name: str,
    functions: Sequence[IndexedFunction],
    config: PairsConfig,
    most_queries: int,
    generator: np.random.Generator,
) -> CandidatePool:
    """All functions of a package, and docstring questions about at most `most_queries` of them.

    A docstring that several functions share identifies none of them, so it makes no question.
    """
    candidates = [item for item in functions if item.num_lines >= config.least_body_lines]
    summaries = Counter(item.summary for item in candidates)
    questions = [
        index
        for index, item in enumerate(candidates)
        if summaries[item.summary] == 1
        and len(split_words(item.summary)) >= config.least_query_words
    ]
    chosen = sorted(generator.permutation(len(questions))[:most_queries])
    answers = tuple(questions[index] for index in chosen)
    return CandidatePool(
        name,
        tuple(item.code for item in candidates),
        tuple(candidates[index].summary for index in answers),
        answers,
    )


def index_codes(codes: Sequence[CodeText]) -> ChunkPostings:
    """Postings of pieces of code, in their order and without vectors."""
    no_vector = np.zeros(0, dtype=np.float32)
    features = [features_of(code, no_vector) for code in codes]
    return ChunkPostings([Chunk("", 1, 1, "", "")] * len(codes), features)


def lexical_scores(pool: CandidatePool, rules: Sequence[FieldRule] = BY_FIELD) -> np.ndarray:
    """BM25 scores as in serving. With BODY_ONLY they are those of plain BM25."""
    segment = index_codes(pool.codes)
    return np.stack(
        [
            score_words(segment, split_words(query), [segment.statistics], rules=rules)
            for query in pool.queries
        ]
    )


def ranks_of(pool: CandidatePool, scores: np.ndarray) -> np.ndarray:
    """Rank of each answer, from 1. Other chunks with the same score count half."""
    answers = scores[np.arange(len(pool.answers)), list(pool.answers)][:, None]
    above = (scores > answers).sum(axis=1)
    tied = (scores == answers).sum(axis=1) - 1
    return 1.0 + above + tied / 2


def summarise_ranks(ranks: np.ndarray) -> RankingScores:
    """Mean reciprocal rank, and recall at 1, 5 and 10."""
    return RankingScores(
        queries=len(ranks),
        mrr=float((1 / ranks).mean()) if len(ranks) else 0.0,
        recall_1=float((ranks <= 1).mean()) if len(ranks) else 0.0,
        recall_5=float((ranks <= 5).mean()) if len(ranks) else 0.0,
        recall_10=float((ranks <= 10).mean()) if len(ranks) else 0.0,
    )


def dense_scores(embedder: Embedder, pool: CandidatePool) -> np.ndarray:
    """Dot products of question and code vectors."""
    vocabulary = embedder.vocabulary
    with torch.inference_mode():
        query_QD = embedder.encode_queries([vocabulary.bag_of_query(q) for q in pool.queries])
        code_CD = embedder.encode_code([vocabulary.bag_of_code(code) for code in pool.codes])
        return (query_QD @ code_CD.T).numpy().astype(np.float64)


def fuse_rows(lexical: np.ndarray, dense: np.ndarray, weight: float) -> np.ndarray:
    """Standardised fusion of each question's scores, as in the index."""
    rows = zip(lexical, dense, strict=True)
    return np.stack([fuse_standardised(words, products, weight) for words, products in rows])


def pick_dense_weight(embedder: Embedder, pools: Sequence[CandidatePool]) -> float:
    """The weight of the vectors relative to BM25 with the best mean reciprocal rank on these pools."""
    if not pools:
        return UNMEASURED_DENSE_WEIGHT
    scored = [(pool, lexical_scores(pool), dense_scores(embedder, pool)) for pool in pools]

    def mean_reciprocal_rank(weight: float) -> float:
        ranks = [ranks_of(pool, fuse_rows(words, dense, weight)) for pool, words, dense in scored]
        return float((1 / np.concatenate(ranks)).mean())

    return max(DENSE_WEIGHTS, key=mean_reciprocal_rank)


def measure_systems(
    embedder: Embedder, pools: Sequence[CandidatePool], dense_weight: float
) -> dict[str, tuple[RankingScores, dict[str, float]]]:
    """Scores of every system over the questions of all pools, and its MRR by pool. Empty without pools."""
    ranks: dict[str, dict[str, np.ndarray]] = defaultdict(dict)
    for pool in pools:
        words, dense = lexical_scores(pool), dense_scores(embedder, pool)
        systems = {
            "bm25": lexical_scores(pool, BODY_ONLY),
            "bm25 by field": words,
            "vectors": dense,
            "fused": fuse_rows(words, dense, dense_weight),
        }
        for system, scores in systems.items():
            ranks[system][pool.name] = ranks_of(pool, scores)
    return {
        system: (
            summarise_ranks(np.concatenate(list(found.values()))),
            {name: float((1 / own).mean()) for name, own in found.items() if len(own)},
        )
        for system, found in ranks.items()
    }
