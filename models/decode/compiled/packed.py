"""Memory of compiled loops: flat arrays that begin at cache lines, matrices in panels.

A packed matrix is panels of 64 columns (the last one narrower), each panel row after row, so that a
product reads memory in order.

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
