"""Ranks and pools, and the whole stage on two small packages."""

from pathlib import Path

import numpy as np
import pytest

from ostinato.infra.agent.search.encoder import BagEncoder
from ostinato.infra.agent.search.field_scores import BODY_ONLY
from ostinato.infra.platform.cluster.workspace import Workspace
from ostinato.infra.platform.settings import Settings
from ostinato.models.search_encoder.code_words import describe_code
from ostinato.models.search_encoder.config import TowerConfig
from ostinato.tasks.retrieval.config import (
    ContrastiveConfig,
    PairsConfig,
    RetrievalConfig,
    RetrievalRequest,
)
from ostinato.tasks.retrieval.measure import (
    CandidatePool,
    fuse_rows,
    lexical_scores,
    make_pool,
    ranks_of,
    summarise_ranks,
)
from ostinato.tasks.retrieval.pairs import functions_of
from ostinato.tasks.retrieval.run import main

CODES = (
    describe_code("a.py", "load_cart", "def load_cart():\n    pass"),
    describe_code("a.py", "other", "def other():\n    load_cart(load_cart(load_cart(load_cart)))"),
    describe_code("a.py", "third", "def third():\n    pass"),
)
POOL = CandidatePool("pool", CODES, ("load cart", "third"), (0, 2))


def test_ranks_count_what_stands_above_and_half_of_what_ties() -> None:
    scores = np.array([[2.0, 3.0, 1.0], [1.0, 1.0, 1.0]])

    assert ranks_of(POOL, scores).tolist() == [2.0, 2.0]


def test_summary_of_perfect_ranks_is_one() -> None:
    scores = summarise_ranks(np.ones(4))

    assert (scores.mrr, scores.recall_1, scores.recall_10) == (1.0, 1.0, 1.0)


def test_a_tie_across_the_limit_is_not_within_it() -> None:
    scores = summarise_ranks(np.array([1.0, 1.5, 5.5, 10.5]))

    assert (scores.recall_1, scores.recall_5, scores.recall_10) == (0.25, 0.5, 0.75)


def test_names_outrank_mentions_only_by_field() -> None:
    by_field = ranks_of(POOL, lexical_scores(POOL))
    plain = ranks_of(POOL, lexical_scores(POOL, BODY_ONLY))

    assert by_field.tolist() == [1.0, 1.0]
    assert plain[0] > 1


def test_vectors_without_weight_change_no_rank() -> None:
    words = lexical_scores(POOL)
    noise = np.random.default_rng(0).normal(size=words.shape)

    assert ranks_of(POOL, fuse_rows(words, noise, 0.0)).tolist() == [1.0, 1.0]


def test_shared_docstrings_are_not_asked() -> None:
    text = "".join(
        f'def {name}(value):\n    """{said}"""\n    first = value\n    return first\n\n\n'
        for name, said in (
            ("a", "Give it back now."),
            ("b", "Give it back now."),
            ("c", "Return the value."),
        )
    )
    pool = make_pool(
        "pkg", functions_of("pkg", "a.py", text), PairsConfig(), 9, np.random.default_rng(0)
    )

    assert (len(pool.codes), pool.queries) == (3, ("Return the value.",))


@pytest.fixture(scope="module")
def tiny_config() -> RetrievalConfig:
    return RetrievalConfig(
        train_packages=("tenacity",),
        validation_packages=("pluggy",),
        held_out_packages=("sortedcontainers",),
        most_queries_a_package=20,
        tower=TowerConfig(width=16, num_words=500, num_buckets=64),
        contrastive=ContrastiveConfig(epochs=1, batch_pairs=32),
    )


def test_the_stage_leaves_an_encoder_that_serves_and_a_report(
    tiny_config: RetrievalConfig, tmp_path: Path
) -> None:
    workspace = Workspace.open(tmp_path, Settings(home=tmp_path))
    result = main(RetrievalRequest(config=tiny_config), workspace)

    assert {"bm25", "bm25 by field", "fused, untrained", "fused, trained"} <= set(result.held_out)
    assert result.held_out["fused, trained"].queries == 20
    assert set(result.by_package) == {"sortedcontainers"}
    assert BagEncoder(Path(result.directory)).dense_weight == result.dense_weight
    assert (Path(result.directory) / "report.json").is_file()
