"""Two ways of scoring the same rows joined into one order."""

import numpy as np


def fuse_standardised(lexical: np.ndarray, dense: np.ndarray, dense_weight: float) -> np.ndarray:
    """Sum of z-scores, the second times `dense_weight`. Scores that are all equal count nothing."""
    return _standardised(lexical) + dense_weight * _standardised(dense)


def _standardised(scores: np.ndarray) -> np.ndarray:
    if not len(scores):
        return scores
    deviation = scores.std()
    if deviation <= 1e-9 * max(1.0, float(np.abs(scores).max())):
        return np.zeros_like(scores)
    return (scores - scores.mean()) / deviation
