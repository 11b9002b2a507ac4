"""Is the policy that sampled the policy that is trained? Mismatch KL between engine and trainer
log-probs.

It computes no log-probs.

With d = trainer - engine a token: k1 = -mean(d), k3 = mean(exp(d) - 1 - d) >= 0, ratio = exp(d).
"""

import logging
from dataclasses import dataclass

import numpy as np

from ostinato.infra.platform.telemetry import fields

_logger = logging.getLogger(__name__)

# published alarm level; engines with rounding differences only stay under 1e-6 in float32
ALARM_K3 = 1e-3


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Distance of the two sides over one set of tokens."""

    tokens: int
    k1: float
    k3: float
    p99_ratio: float  # 99th percentile over tokens of max(ratio, 1 / ratio)
    max_ratio: float


def measure_mismatch(engine_logprobs_T: np.ndarray, trainer_logprobs_T: np.ndarray) -> Mismatch:
    """Compares log-probs token by token. ValueError for empty or unequal arrays."""
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


@dataclass(frozen=True, slots=True)
class ParityAlarm:
    """A step at which engine and trainer disagree: the payload of a `parity_alarm` event."""

    step: int
    k1: float
    k3: float
    p99_ratio: float
    tokens: int
    alarm_k3: float
    k3_without_replay: float | None  # on the trainer's own routes; None: not measured


class ParityMonitor:
    """Watches one run: measures or judges each step and raises the alarm."""

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
        self.judge(step, mismatch)
        return mismatch

    def judge(
        self, step: int, replayed: Mismatch, without_replay: Mismatch | None = None
    ) -> ParityAlarm | None:
        """The alarm when the mismatch with router replay is above the level. None when it is not.

        The mismatch without replay is told along: when it alone is high, routing differs and replay
        does its work; when both are, something else does.
        """
        self.worst_k3 = max(self.worst_k3, replayed.k3)
        if replayed.k3 <= self._alarm_k3:  # NaN is not: it is an alarm too
            return None
        self.alarms += 1
        alarm = ParityAlarm(
            step=step,
            k1=replayed.k1,
            k3=replayed.k3,
            p99_ratio=replayed.p99_ratio,
            tokens=replayed.tokens,
            alarm_k3=self._alarm_k3,
            k3_without_replay=None if without_replay is None else without_replay.k3,
        )
        _logger.error(
            "engine and trainer disagree %s",
            fields(
                run=self._run_id,
                step=step,
                k3=alarm.k3,
                alarm=alarm.alarm_k3,
                without_replay=alarm.k3_without_replay,
                tokens=alarm.tokens,
            ),
        )
        return alarm
