"""Training: a tiny run finds answers it could not find before, on code."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from ostinato.models.search_encoder.code_words import CodeText, describe_code
from ostinato.models.search_encoder.config import TowerConfig
from ostinato.models.search_encoder.embedder import Embedder, contrastive_loss
from ostinato.tasks.retrieval import run as training
from ostinato.tasks.retrieval.config import (
    ContrastiveConfig,
    RetrievalConfig,
)
from ostinato.tasks.retrieval.measure import (
    CandidatePool,
    dense_scores,
    ranks_of,
    summarise_ranks,
)
from ostinato.tasks.retrieval.pairs import Pair
from ostinato.tasks.retrieval.run import (
    build_embedder,
    mine_negatives,
    train_on_code,
)

# what people say and what code says, with no word in common
MEANINGS = {
    "remove": "del",
    "combine": "merge",
    "file": "path",
    "picture": "image",
    "number": "integer",
    "begin": "start",
    "text": "string",
    "wait": "sleep",
}
CONFIG = RetrievalConfig(
    tower=TowerConfig(width=16, num_words=64, num_buckets=16, query_dropout=0, code_dropout=0),
)


def silent(done: int, total: int, loss: float) -> None:
    pass


def make_pairs(count: int, seed: int) -> list[Pair]:
    random = np.random.default_rng(seed)
    pairs = []
    for _ in range(count):
        chosen = random.choice(sorted(MEANINGS), 3, replace=False)
        body = " ".join(MEANINGS[word] for word in chosen)
        pairs.append(Pair(" ".join(chosen), describe_code("", "", body)))
    return pairs


def pool_of(pairs: Sequence[Pair]) -> CandidatePool:
    unique = {pair.code: pair.query for pair in pairs}
    return CandidatePool("pool", tuple(unique), tuple(unique.values()), tuple(range(len(unique))))


def mrr(embedder: Embedder, pool: CandidatePool) -> float:
    return summarise_ranks(ranks_of(pool, dense_scores(embedder, pool))).mrr


def build(pairs: Sequence[Pair]) -> Embedder:
    spoken = [CodeText("", "", "", pair.query) for pair in pairs]
    return build_embedder([*(pair.code for pair in pairs), *spoken], CONFIG)


def test_a_tiny_run_learns_words_that_mean_the_same() -> None:
    pairs, pool = make_pairs(120, seed=1), pool_of(make_pairs(30, seed=2))
    embedder = build(pairs)
    before = mrr(embedder, pool)
    config = ContrastiveConfig(epochs=6, batch_pairs=24, hard_negatives=1, learning_rate=0.02)
    losses = train_on_code(embedder, pairs, config, seed=0, report=silent)

    assert losses[-1] < losses[0] / 2
    assert mrr(embedder, pool) > before + 0.2


def test_the_same_seed_gives_the_same_encoder() -> None:
    pairs = make_pairs(40, seed=1)
    config = ContrastiveConfig(epochs=1, batch_pairs=20, learning_rate=0.02)
    losses = [train_on_code(build(pairs), pairs, config, 5, silent) for _ in range(2)]

    assert losses[0] == losses[1]


def test_mined_negatives_are_never_the_answer_and_share_words_with_the_question() -> None:
    pairs = [
        Pair("merge path", describe_code("", "", "merge path")),
        Pair("sleep", describe_code("", "", "sleep")),
        Pair("start", describe_code("", "", "merge path other")),
    ]
    negatives = mine_negatives(pairs, per_query=1, seed=0)

    assert negatives.shape == (3, 1)
    assert all(negatives[row, 0] != row for row in range(3))


@pytest.mark.parametrize(("count", "per_query"), [(2, 1), (3, 2), (5, 1), (9, 1), (9, 3)])
def test_no_block_however_small_gives_a_question_its_own_answer(
    monkeypatch: pytest.MonkeyPatch, count: int, per_query: int
) -> None:
    monkeypatch.setattr(training, "_MINED_BLOCK_PAIRS", 4)  # the last of 5 or 9 stands alone
    for seed in range(4):
        negatives = mine_negatives(make_pairs(count, seed=1), per_query, seed)

        assert (negatives != np.arange(count)[:, None]).all()


def test_no_column_of_a_batch_is_an_answer_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = list({pair.code: pair for pair in make_pairs(12, seed=1)}.values())
    seen: list[np.ndarray] = []

    def note(queries: torch.Tensor, codes: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        seen.append(codes.detach().numpy())
        return contrastive_loss(queries, codes, temperature)

    monkeypatch.setattr(training, "contrastive_loss", note)
    config = ContrastiveConfig(epochs=2, batch_pairs=len(pairs), hard_negatives=2)
    train_on_code(build(pairs), pairs, config, seed=0, report=silent)

    assert [len(np.unique(codes, axis=0)) for codes in seen] == [len(codes) for codes in seen]


@pytest.mark.parametrize("epochs", [1, 2, 9])
def test_runs_of_few_steps_have_a_schedule(epochs: int) -> None:
    # nine steps divided by zero in a schedule with a fixed share of warm-up
    pairs = make_pairs(4, seed=0)
    config = ContrastiveConfig(epochs=epochs, batch_pairs=4)

    assert len(train_on_code(build(pairs), pairs, config, 0, silent)) == epochs


@pytest.mark.parametrize("pairs", [[], make_pairs(1, seed=0)])
def test_too_little_to_learn_from_changes_nothing(pairs: list[Pair]) -> None:
    embedder = build(make_pairs(4, seed=0))

    assert train_on_code(embedder, pairs, ContrastiveConfig(), 0, silent) == []
