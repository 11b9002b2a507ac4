"""Weights laid out for compiled loops: flat arrays, matrices in panels.

`PackedWeights` and how a matrix is packed: panels of 64 columns (the last one narrower), each panel
row after row, so that a product reads memory in order. It needs no compiler.

Shapes: V vocabulary, D model width, H query heads, G key/value heads, d head width, E experts, F
expert width, M draft width.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

LANES = 16  # float32 in a vector register of 512 bits; LLVM splits it where registers are shorter
PANEL = 64
_LINE_BYTES = 64


@dataclass(frozen=True, slots=True)
class PackedDraft:
    """One draft layer."""

    hidden_in: np.ndarray  # packed [D, D]
    embed_in: np.ndarray  # packed [D, D]
    gate_up: np.ndarray  # packed [D, 2M]
    down: np.ndarray  # packed [M, D]
    norm_D: np.ndarray

    def arrays(self) -> tuple[np.ndarray, ...]:
        """In the order that the compiled draft takes them."""
        return self.hidden_in, self.embed_in, self.gate_up, self.down, self.norm_D


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """All matrices of one version. Those of layers and experts follow one another."""

    embedding_VD: np.ndarray
    head: np.ndarray  # the embedding again, packed as [D, V]
    qkv: np.ndarray  # packed [D, (H + 2G) * d] a layer
    qk_scale: np.ndarray  # [H + G, d] a layer
    output: np.ndarray  # packed [H * d, D] a layer
    gate: np.ndarray  # packed [D, E], E padded, a layer
    gate_bias: np.ndarray  # [E] a layer
    up: np.ndarray  # packed [D, 2F] an expert of a layer
    down: np.ndarray  # packed [F, D] an expert of a layer
    final_norm_D: np.ndarray
    drafts: tuple[PackedDraft, ...]

    def arrays(self) -> tuple[np.ndarray, ...]:
        """In the order that the compiled trunk takes them."""
        return (
            self.embedding_VD,
            self.head,
            self.qkv,
            self.qk_scale,
            self.output,
            self.gate,
            self.gate_bias,
            self.up,
            self.down,
            self.final_norm_D,
        )


def whole_vectors(columns: int) -> int:
    """Columns rounded up to whole vectors."""
    return -(-columns // LANES) * LANES


def aligned_floats(count: int) -> np.ndarray:
    """Zeros that begin at a cache line, so that no vector lies across two."""
    spare_floats = _LINE_BYTES // 4
    floats = np.zeros(count + spare_floats, dtype=np.float32)
    first = -floats.ctypes.data % _LINE_BYTES // 4
    return floats[first : first + count]


def pack_matrix(matrix_KO: Tensor) -> np.ndarray:
    """Panels of a matrix, columns padded with zeros to whole vectors."""
    depth, columns = matrix_KO.shape
    padded = torch.zeros(depth, whole_vectors(columns))
    padded[:, :columns] = matrix_KO
    panels = padded.split(PANEL, dim=1)
    return join_flat(panels)


def join_flat(parts: Iterable[Tensor]) -> np.ndarray:
    """The elements of all parts in order."""
    return join_packed(part.contiguous().view(-1).numpy() for part in parts)


def join_packed(matrices: Iterable[np.ndarray]) -> np.ndarray:
    """Flat arrays one after another."""
    parts = list(matrices)
    joined = aligned_floats(sum(map(len, parts)))
    return np.concatenate(parts, out=joined)
