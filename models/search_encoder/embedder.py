"""The code-search encoder: a weighted bag of word vectors, trained in torch.

Queries and code share word vectors. Each side has its own word weights, and queries pass one more
linear map. Bucket vectors are fixed and random: they only distinguish unknown words.

Another tower, such as a transformer, could offer the same two calls, `encode_queries` and
`encode_code`. Serving does not import this file: infra/agent/search/encoder.py reads
`save_embedder`'s files.

Shapes: B texts, W words of all texts together, D width, V rows of the table, F fields.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from ostinato.models.search_encoder.code_words import Vocabulary, WordBag
from ostinato.models.search_encoder.config import TowerConfig

WEIGHTS_FILE = "encoder.safetensors"
DESCRIPTION_FILE = "encoder.json"
FIRST_FIELD_SCALES = (0.5, 2.0, 1.0, 1.0)  # scope, name, head, body


class Embedder(nn.Module):
    """Bag-of-words tower with two sides."""

    def __init__(
        self,
        config: TowerConfig,
        vocabulary: Vocabulary,
        rarity_V: np.ndarray | None = None,
        seed: int = 0,
    ) -> None:
        """`rarity_V`: starting weight of each known word (inverse document frequency). None: 1."""
        super().__init__()
        self.config = config
        self.vocabulary = vocabulary
        generator = torch.Generator().manual_seed(seed)
        table_VD = torch.randn(len(vocabulary), config.width, generator=generator)
        table_VD /= table_VD.norm(dim=1, keepdim=True)
        known = vocabulary.num_known
        self.vectors_VD = nn.Parameter(table_VD[:known].clone())
        self.bucket_vectors = nn.Buffer(table_VD[known:].clone())
        start = torch.zeros(known) if rarity_V is None else torch.from_numpy(rarity_V).log()
        unknown = start.max().reshape(1) if known else torch.zeros(1)
        weights = torch.cat([start.to(torch.float32), unknown.to(torch.float32)])
        self.query_log_weights = nn.Parameter(weights.clone())
        self.code_log_weights = nn.Parameter(weights.clone())
        self.field_log_scales = nn.Parameter(torch.tensor(FIRST_FIELD_SCALES).log())
        self.query_map_DD = nn.Parameter(torch.eye(config.width))
        self.log_temperature = nn.Parameter(torch.tensor(0.07).log())
        buckets = [vocabulary.bucket_of(word) for word in vocabulary.words]
        self.bucket_of_word = nn.Buffer(torch.tensor(buckets, dtype=torch.int64), persistent=False)

    def encode_queries(
        self, bags: Sequence[WordBag], generator: torch.Generator | None = None
    ) -> Tensor:
        """Unit vectors [B, D]. With a generator, words are dropped as in training."""
        return self._encode(
            bags, self.query_log_weights, self.query_map_DD, self.config.query_dropout, generator
        )

    def encode_code(
        self, bags: Sequence[WordBag], generator: torch.Generator | None = None
    ) -> Tensor:
        """Unit vectors [B, D]. With a generator, words are dropped as in training."""
        return self._encode(bags, self.code_log_weights, None, self.config.code_dropout, generator)

    def _encode(
        self,
        bags: Sequence[WordBag],
        log_weights: Tensor,
        map_DD: Tensor | None,
        dropout: float,
        generator: torch.Generator | None,
    ) -> Tensor:
        ids_W = torch.from_numpy(np.concatenate([bag.ids for bag in bags]))
        counts_WF = torch.from_numpy(np.concatenate([bag.counts for bag in bags]))
        sizes = torch.tensor([0, *(len(bag.ids) for bag in bags[:-1])])
        kept_W = torch.ones(len(ids_W))
        if generator is not None:
            kept_W = (torch.rand(len(ids_W), generator=generator) >= dropout).float()
            ids_W = self._forget(ids_W, generator)
        known = self.vocabulary.num_known
        weights_W = log_weights[ids_W.clamp(max=known)].exp()
        factors_W = (counts_WF.log1p() * self.field_log_scales.exp()).sum(dim=1)
        sums_BD = functional.embedding_bag(
            ids_W,
            torch.cat([self.vectors_VD, self.bucket_vectors]),
            sizes.cumsum(0),
            mode="sum",
            per_sample_weights=weights_W * factors_W * kept_W,
        )
        if map_DD is not None:
            sums_BD = sums_BD @ map_DD
        return functional.normalize(sums_BD, dim=1)

    def _forget(self, ids_W: Tensor, generator: torch.Generator) -> Tensor:
        """The ids of the words if a random part of the vocabulary were unknown."""
        known = self.vocabulary.num_known
        is_forgotten = torch.rand(known, generator=generator) < self.config.forget_ratio
        rows_V = torch.arange(len(self.vocabulary))
        rows_V[:known] = torch.where(is_forgotten, self.bucket_of_word, rows_V[:known])
        return rows_V[ids_W]


def contrastive_loss(query_BD: Tensor, code_CD: Tensor, temperature: Tensor) -> Tensor:
    """InfoNCE in nats per pair, averaged over both directions. Row i of `code_CD` answers query i;
    rows beyond the queries are negatives.
    """
    similarities_BC = query_BD @ code_CD.T / temperature
    targets_B = torch.arange(len(query_BD))
    forward = functional.cross_entropy(similarities_BC, targets_B)
    backward = functional.cross_entropy(similarities_BC[:, : len(query_BD)].T, targets_B)
    return (forward + backward) / 2


def save_embedder(embedder: Embedder, directory: Path, metadata: dict[str, object]) -> None:
    """Writes the two files of an encoder. `metadata` goes into the description."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in embedder.state_dict().items()}
    save_file(tensors, directory / WEIGHTS_FILE)
    description = {
        "schema_version": 1,
        "config": embedder.config.model_dump(mode="json"),
        "words": list(embedder.vocabulary.words),
        "metadata": metadata,
    }
    (directory / DESCRIPTION_FILE).write_text(json.dumps(description, indent=1))
