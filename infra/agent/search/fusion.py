"""Joins two ways of scoring the same rows into one order.

It knows nothing of text.
"""

import numpy as np

RANK_SMOOTHING = 60.0


def fuse_standardised(lexical: np.ndarray, dense: np.ndarray, dense_weight: float) -> np.ndarray:
    """Sum of z-scores, the second times `dense_weight`. Scores that are all equal count nothing."""
    return _standardised(lexical) + dense_weight * _standardised(dense)


def fuse_ranks(lexical: np.ndarray, dense: np.ndarray, dense_weight: float) -> np.ndarray:
    """Sum of 1 / (60 + rank), the second times `dense_weight`. Equal scores share their best rank."""
    return 1 / (RANK_SMOOTHING + _ranks(lexical)) + dense_weight / (RANK_SMOOTHING + _ranks(dense))


def _standardised(scores: np.ndarray) -> np.ndarray:
    if not len(scores):
        return scores
    deviation = scores.std()
    if deviation <= 1e-9 * max(1.0, float(np.abs(scores).max())):
        return np.zeros_like(scores)
    return (scores - scores.mean()) / deviation


def _ranks(scores: np.ndarray) -> np.ndarray:
    """1 for the best. The number of strictly better rows plus 1."""
    ordered = np.sort(scores)
    return len(scores) - np.searchsorted(ordered, scores, side="right") + 1.0
