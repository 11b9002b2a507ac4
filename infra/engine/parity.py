"""Is the policy that sampled the policy that is trained? Mismatch KL between engine and trainer
log-probs.

Owns `measure_mismatch` and `ParityMonitor`. Enters: log-probs of the same sampled tokens from both
sides, at equal weight versions. Leaves: k1, k3 and the tail of the probability ratio, and an alarm.
It computes no log-probs.

With d = trainer - engine a token: k1 = -mean(d), k3 = mean(exp(d) - 1 - d) >= 0, ratio = exp(d).
"""

import logging
from dataclasses import dataclass

import numpy as np

from infra.telemetry import fields

_logger = logging.getLogger(__name__)

ALARM_K3 = (
    1e-3  # published alarm level; engines with rounding differences only stay under 1e-6 in float32
)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Distance of the two sides over one set of tokens."""

    tokens: int
    k1: float
    k3: float
    p99_ratio: float  # 99th percentile over tokens of max(ratio, 1 / ratio)
    max_ratio: float


def measure_mismatch(engine_logprobs_T: np.ndarray, trainer_logprobs_T: np.ndarray) -> Mismatch:
    """Compares log-probs token by token; ValueError when the arrays are not parallel or hold no
    token.
    """
    if engine_logprobs_T.shape != trainer_logprobs_T.shape or engine_logprobs_T.size == 0:
        raise ValueError(
            f"engine log-probs have shape {engine_logprobs_T.shape}, "
            f"trainer's {trainer_logprobs_T.shape}, wanted equal and not empty"
        )
    difference = trainer_logprobs_T.astype(np.float64) - engine_logprobs_T.astype(np.float64)
    ratio = np.exp(np.abs(difference))
    return Mismatch(
        tokens=int(difference.size),
        k1=float(-difference.mean()),
        k3=float((np.expm1(difference) - difference).mean()),
        p99_ratio=float(np.quantile(ratio, 0.99)),
        max_ratio=float(ratio.max()),
    )


class ParityMonitor:
    """Watches one run: measures each step and raises the alarm in the log."""

    def __init__(self, run_id: str, alarm_k3: float = ALARM_K3) -> None:
        self._run_id = run_id
        self._alarm_k3 = alarm_k3
        self.worst_k3 = 0.0
        self.alarms = 0

    def observe(
        self, step: int, engine_logprobs_T: np.ndarray, trainer_logprobs_T: np.ndarray
    ) -> Mismatch:
        """Measures one step's tokens that were sampled by the version that now computes them."""
        mismatch = measure_mismatch(engine_logprobs_T, trainer_logprobs_T)
        self.worst_k3 = max(self.worst_k3, mismatch.k3)
        if not mismatch.k3 <= self._alarm_k3:  # NaN is an alarm too
            self.alarms += 1
            _logger.error(
                "engine and trainer disagree %s",
                fields(
                    run=self._run_id,
                    step=step,
                    k3=mismatch.k3,
                    alarm=self._alarm_k3,
                    tokens=mismatch.tokens,
                ),
            )
        return mismatch
