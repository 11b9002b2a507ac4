"""Memory of compiled loops: flat arrays that begin at cache lines, matrices in panels.

A packed matrix is panels of 64 columns (the last one narrower), each panel row after row, so that a
product reads memory in order. Numbers are float32, or bf16 as the uint16 of their bits.

Shapes: K rows, O columns.
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from ostinato.models.decode.supported import LANES

PANEL = 64
_LINE_BYTES = 64


def whole_vectors(columns: int) -> int:
    """Columns rounded up to whole vectors."""
    return -(-columns // LANES) * LANES


def aligned_floats(count: int) -> np.ndarray:
    """Zeros that begin at a cache line, so that no vector lies across two."""
    return _aligned(count, np.dtype(np.float32))


def _aligned(count: int, kind: np.dtype) -> np.ndarray:
    items = np.zeros(count + _LINE_BYTES // kind.itemsize, dtype=kind)
    first = -items.ctypes.data % _LINE_BYTES // kind.itemsize
    return items[first : first + count]


def pack_matrix(matrix_KO: Tensor) -> np.ndarray:
    """Panels of a matrix, columns padded with zeros to whole vectors."""
    depth, columns = matrix_KO.shape
    padded = torch.zeros(depth, whole_vectors(columns), dtype=matrix_KO.dtype)
    padded[:, :columns] = matrix_KO
    panels = padded.split(PANEL, dim=1)
    return join_flat(panels)


def join_flat(parts: Iterable[Tensor]) -> np.ndarray:
    """The elements of all parts in order."""
    flat = [part.contiguous().view(-1) for part in parts]
    return join_packed(
        (part.view(torch.uint16) if part.dtype == torch.bfloat16 else part).numpy() for part in flat
    )


def join_packed(matrices: Iterable[np.ndarray]) -> np.ndarray:
    """Flat arrays one after another."""
    parts = list(matrices)
    joined = _aligned(sum(map(len, parts)), parts[0].dtype)
    return np.concatenate(parts, out=joined)
