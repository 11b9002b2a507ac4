"""Lengths and durations of sampled and of trained trajectories. They differ when slow groups become
stale, because the policy is then trained on shorter attempts.
"""

from collections import deque
from collections.abc import Iterable

import numpy as np

from ostinato.tasks.records import Trajectory

WINDOW_TRAJECTORIES = 4096
QUANTILES = (0.5, 0.9, 0.99)


class LengthAndDuration:
    """Generated tokens and seconds of the latest trajectories."""

    def __init__(self) -> None:
        self._tokens: deque[int] = deque(maxlen=WINDOW_TRAJECTORIES)
        self._seconds: deque[float] = deque(maxlen=WINDOW_TRAJECTORIES)

    def add(self, trajectories: Iterable[Trajectory]) -> None:
        for trajectory in trajectories:
            self._tokens.append(generated_tokens(trajectory))
            self._seconds.append(trajectory.finished_at - trajectory.started_at)

    def quantiles(self, prefix: str) -> dict[str, float]:
        """Mean and quantiles by metric name."""
        metrics: dict[str, float] = {}
        for name, values in (("tokens", self._tokens), ("seconds", self._seconds)):
            if not values:
                continue
            row = np.asarray(values, dtype=np.float64)
            metrics[f"{prefix}_{name}_mean"] = float(row.mean())
            for quantile, value in zip(QUANTILES, np.quantile(row, QUANTILES), strict=True):
                metrics[f"{prefix}_{name}_p{round(quantile * 100)}"] = float(value)
        return metrics


def generated_tokens(trajectory: Trajectory) -> int:
    """Tokens that the model generated in a whole attempt."""
    return sum(turn.generated_tokens for turn in trajectory.transcript.turns)
