"""The tower: unit vectors, losses that say what they should, files that come back."""

from pathlib import Path

import numpy as np
import pytest
import torch

from ostinato.infra.agent.search.encoder import BagEncoder
from ostinato.models.search_encoder.code_words import Vocabulary, describe_code
from ostinato.models.search_encoder.config import TowerConfig
from ostinato.models.search_encoder.embedder import (
    Embedder,
    contrastive_loss,
    save_embedder,
)

WORDS = ("merge", "split", "list", "count", "def", "return")
CODES = [
    describe_code("a.py", "merge", "def merge(left, right):\n    return left + right"),
    describe_code("pkg/b.py", "Box.split_list", "def split_list(self):\n    return self.zebra"),
    describe_code("c.md", "", ""),
]
QUERIES = ["merge a list", "zebra", ""]


@pytest.fixture
def embedder() -> Embedder:
    config = TowerConfig(width=8, num_words=6, num_buckets=32)
    rarity = np.linspace(0.5, 2.0, len(WORDS)).astype(np.float32)
    tower = Embedder(config, Vocabulary(WORDS, 32), rarity, seed=3)
    with torch.no_grad():
        tower.query_map_DD += 0.1 * torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
        tower.code_log_weights += 0.3
    return tower


def encode(tower: Embedder) -> tuple[torch.Tensor, torch.Tensor]:
    vocabulary = tower.vocabulary
    return (
        tower.encode_queries([vocabulary.bag_of_query(query) for query in QUERIES]),
        tower.encode_code([vocabulary.bag_of_code(code) for code in CODES]),
    )


def test_vectors_have_unit_length_and_empty_texts_none(embedder: Embedder) -> None:
    queries, codes = encode(embedder)

    assert queries.norm(dim=1).tolist() == pytest.approx([1, 1, 0])
    assert codes.norm(dim=1).tolist() == pytest.approx([1, 1, 1])  # the path is text as well


def test_a_vocabulary_without_a_known_word_trains() -> None:
    tower = Embedder(TowerConfig(width=8, num_buckets=32), Vocabulary((), 32))
    bags = [tower.vocabulary.bag_of_query(query) for query in QUERIES]

    vectors = tower.encode_queries(bags, torch.Generator().manual_seed(0))

    assert vectors.shape == (len(QUERIES), 8)


def test_the_serving_encoder_gives_the_same_vectors(embedder: Embedder, tmp_path: Path) -> None:
    save_embedder(embedder, tmp_path, {"dense_weight": 0.4})
    served = BagEncoder(tmp_path)
    queries, codes = encode(embedder)

    assert served.dense_weight == 0.4
    # fp32 sums in another order
    assert served.encode_code(CODES) == pytest.approx(codes.detach().numpy(), abs=1e-6)
    for text, wanted in zip(QUERIES, queries.detach().numpy(), strict=True):
        assert served.encode_query(text) == pytest.approx(wanted, abs=1e-6)


def test_another_weight_is_another_model(embedder: Embedder, tmp_path: Path) -> None:
    save_embedder(embedder, tmp_path / "a", {})
    with torch.no_grad():
        embedder.vectors_VD[0, 0] += 1
    save_embedder(embedder, tmp_path / "b", {})

    assert BagEncoder(tmp_path / "a").model_id != BagEncoder(tmp_path / "b").model_id


def test_unknown_words_learn_nothing_but_their_weight(embedder: Embedder) -> None:
    queries, codes = encode(embedder)
    (queries @ codes.T).sum().backward()

    assert embedder.vectors_VD.grad is not None
    assert not embedder.bucket_vectors.requires_grad
    assert embedder.code_log_weights.grad is not None
    assert embedder.code_log_weights.grad[-1] != 0


def test_contrastive_loss_is_zero_for_sure_answers_and_log_of_the_pool_for_no_idea() -> None:
    sure = torch.eye(4)
    assert contrastive_loss(sure, sure, torch.tensor(0.01)) == pytest.approx(0, abs=1e-6)
    same = torch.ones(4, 2)
    assert contrastive_loss(same, same, torch.tensor(0.1)) == pytest.approx(np.log(4))
