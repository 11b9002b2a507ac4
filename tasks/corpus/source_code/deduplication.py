"""Exact and near copies of files. Near copies are found by min-hash over line shingles: files are
compared in full only if they share a band of their sketches.
"""

from collections import defaultdict
from enum import StrEnum

import numpy as np
import xxhash

SKETCH_SIZE = 32
BAND_ROWS = 4
SHINGLE_LINES = 3
# For odd m, x -> x * m mod 2**64 is a permutation; each defines an order for the minimum.
_MULTIPLIERS_S = np.array(
    [xxhash.xxh3_64_intdigest(str(index).encode()) | 1 for index in range(SKETCH_SIZE)],
    dtype=np.uint64,
)


class Novelty(StrEnum):
    """Relation of a file to those before it."""

    NEW = "new"
    EXACT_DUPLICATE = "exact_duplicate"
    NEAR_DUPLICATE = "near_duplicate"


class Deduplicator:
    """Memory of the files seen before."""

    def __init__(self, near_duplicate_ratio: float) -> None:
        self._ratio = near_duplicate_ratio
        self._seen: set[int] = set()
        self._shingles: list[frozenset[int]] = []
        self._bands: dict[tuple[int, ...], list[int]] = defaultdict(list)

    def judge(self, text: str) -> Novelty:
        """Compares `text` with earlier texts and remembers it if it is new."""
        lines = [stripped for line in text.splitlines() if (stripped := line.strip())]
        digest = xxhash.xxh3_64_intdigest("\n".join(lines).encode())
        if digest in self._seen:
            return Novelty.EXACT_DUPLICATE
        self._seen.add(digest)
        shingles = _hash_shingles(lines)
        bands = _sketch_bands(shingles)
        candidates = {index for band in bands for index in self._bands.get(band, ())}
        for index in candidates:
            other = self._shingles[index]
            common = len(shingles & other)
            if common / len(shingles | other) >= self._ratio:
                return Novelty.NEAR_DUPLICATE
        for band in bands:
            self._bands[band].append(len(self._shingles))
        self._shingles.append(shingles)
        return Novelty.NEW


def _hash_shingles(lines: list[str]) -> frozenset[int]:
    last = max(len(lines) - SHINGLE_LINES + 1, 1)
    return frozenset(
        xxhash.xxh3_64_intdigest("\n".join(lines[start : start + SHINGLE_LINES]).encode())
        for start in range(last)
    )


def _sketch_bands(shingles: frozenset[int]) -> list[tuple[int, ...]]:
    shingles_N = np.fromiter(shingles, dtype=np.uint64, count=len(shingles))
    sketch = (shingles_N[None, :] * _MULTIPLIERS_S[:, None]).min(axis=1).tolist()
    return [
        (start, *sketch[start : start + BAND_ROWS]) for start in range(0, SKETCH_SIZE, BAND_ROWS)
    ]
