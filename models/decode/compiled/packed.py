"""Arrays of the compiled loops: flat, beginning at a cache line, with matrices in panels.

A packed matrix is panels of 64 columns (the last one narrower), each panel row after row, so that a
product reads memory in order. Numbers are float32, or bf16 with its bits stored as uint16.

Shapes: K rows, O columns.
"""

from collections.abc import Iterable, Iterator

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
    """Zeros that begin at a cache line, so that no vector crosses two lines."""
    return _aligned(count, np.dtype(np.float32))


def _aligned(count: int, kind: np.dtype) -> np.ndarray:
    items = np.zeros(count + _LINE_BYTES // kind.itemsize, dtype=kind)
    first = -items.ctypes.data % _LINE_BYTES // kind.itemsize
    return items[first : first + count]


def pack_matrix(matrix_KO: Tensor) -> np.ndarray:
    """Panels of a matrix. Columns are padded with zeros to whole vectors."""
    depth, columns = matrix_KO.shape
    padded = whole_vectors(columns)
    is_bf16 = matrix_KO.dtype == torch.bfloat16
    packed = _aligned(depth * padded, np.dtype(np.uint16 if is_bf16 else np.float32))
    items = torch.from_numpy(packed).view(matrix_KO.dtype)
    for first in range(0, padded, PANEL):
        last = min(first + PANEL, padded)
        panel_KC = items[depth * first : depth * last].view(depth, last - first)
        part_KC = matrix_KO[:, first:last]
        panel_KC[:, : part_KC.shape[1]] = part_KC
    return packed


def join_flat(parts: Iterable[Tensor]) -> np.ndarray:
    """The elements of all parts in order."""
    parts = [part.contiguous().view(-1) for part in parts]
    arrays = [
        (part.view(torch.uint16) if part.dtype == torch.bfloat16 else part).numpy()
        for part in parts
    ]
    joined = _aligned(sum(map(len, arrays)), arrays[0].dtype)
    return np.concatenate(arrays, out=joined)


def join_packed(matrices: Iterator[np.ndarray], count: int) -> np.ndarray:
    """Joins `count` flat arrays of equal length. Each is created only when it is copied."""
    first = next(matrices)
    joined = _aligned(count * len(first), first.dtype)
    joined[: len(first)] = first
    for number, matrix in enumerate(matrices, start=1):
        joined[number * len(first) :][: len(first)] = matrix
    return joined
