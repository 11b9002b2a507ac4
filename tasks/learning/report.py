"""What one optimiser step says about itself.

Torch-free, so that drivers and reports can read it.

Shapes: N sampled tokens of the step, S samples.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np
from pydantic import Field

from ostinato.tasks.records import Record


class Mismatch(Record):
    """Distance of the trainer's log-probabilities from those the tokens were sampled with."""

    tokens: int
    k1_nats: float = Field(description="mean of log q(rollout) - log p(trainer)")
    k3_nats: float = Field(
        description="mean of r - 1 - log r with r = p(trainer) / q(rollout); never negative"
    )
    p99_ratio: float = Field(description="exp of the 99th percentile of |log r|; 1 is none")
    max_ratio: float = Field(description="exp of the largest |log r|")


class Staleness(Record):
    """Trainer version minus the oldest weight version in a sample."""

    mean_versions: float
    max_versions: int
    histogram: dict[int, int] = Field(description="versions behind -> samples")


class StepReport(Record):
    """One step of the trainer."""

    step: int = Field(description="optimiser steps taken, this one included")
    weight_version: int = Field(description="version of the weights the gradient was taken at")
    is_updated: bool = Field(
        description="false when no sample had both an advantage and a sampled token"
    )
    samples: int
    samples_zero_advantage: int = Field(description="advantage exactly 0: no gradient")
    samples_without_tokens: int = Field(description="nothing was sampled: no gradient")
    computed_tokens: int = Field(
        description="tokens of computed samples, prompt and tool results included"
    )
    padding_ratio: float = Field(description="padding over all places of the microbatches")
    sampled_tokens: int = Field(description="tokens that carry loss")
    reward_mean: float = Field(description="over samples")
    advantage_absolute_mean: float = Field(description="over samples")
    loss: float
    gradient_norm: float = Field(description="before clipping")
    entropy_nats: float = Field(description="mean over sampled tokens")
    mismatch_equal_version: Mismatch = Field(
        description="tokens sampled with the very weights of weight_version"
    )
    mismatch_all: Mismatch
    mismatch_without_replay: Mismatch | None = Field(
        default=None,
        description="as mismatch_equal_version, with the trainer's own routes, over some tokens; None: not asked for",
    )
    is_mismatch_alarming: bool
    staleness: Staleness
    clipped_ratio: float = Field(description="share of sampled tokens outside the clip band")
    capped_ratio: float = Field(
        description="share of sampled tokens whose importance weight was cut"
    )
    importance_weight_mean: float
    replaced_routes_ratio: float = Field(
        description="share of replayed routes the plausibility filter replaced"
    )
    reference_k1_nats: float = Field(
        description="mean over trajectories, to the KL reference; 0 when off"
    )
    wall_seconds: float
    tokens_per_second: float = Field(description="computed tokens over wall seconds")

    def metrics(self) -> dict[str, float]:
        """All numbers under flat names, nested ones joined by an underscore. For one line of a metrics file."""
        flat: dict[str, float] = {}
        for name, value in self.model_dump(exclude={"schema_version"}).items():
            if isinstance(value, dict):
                inner = {
                    key: number for key, number in value.items() if isinstance(number, int | float)
                }
                flat |= {
                    f"{name}_{key}": number
                    for key, number in inner.items()
                    if key != "schema_version"
                }
            elif value is not None:
                flat[name] = value
        return flat


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Scores per sampled token, in any order."""

    trainer_logprobs_N: np.ndarray
    rollout_logprobs_N: np.ndarray
    weight_versions_N: np.ndarray
    entropy_N: np.ndarray
    importance_weights_N: np.ndarray
    is_clipped_N: np.ndarray

    @classmethod
    def concatenate(cls, parts: list["TokenScores"]) -> "TokenScores":
        """All parts as one. Empty arrays when there are none."""
        names = cls.__slots__
        if not parts:
            return cls(*(np.zeros(0) for _ in names))
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def measure_mismatch(trainer_logprobs_N: np.ndarray, rollout_logprobs_N: np.ndarray) -> Mismatch:
    """Statistics of r = p(trainer) / q(rollout) over tokens drawn from q. Zeros and ones when there is none."""
    if not len(trainer_logprobs_N):
        return Mismatch(tokens=0, k1_nats=0.0, k3_nats=0.0, p99_ratio=1.0, max_ratio=1.0)
    log_ratio_N = trainer_logprobs_N.astype(np.float64) - rollout_logprobs_N.astype(np.float64)
    return Mismatch(
        tokens=len(log_ratio_N),
        k1_nats=float(-log_ratio_N.mean()),
        k3_nats=float((np.expm1(log_ratio_N) - log_ratio_N).mean()),
        p99_ratio=float(np.exp(np.quantile(np.abs(log_ratio_N), 0.99))),
        max_ratio=float(np.exp(np.abs(log_ratio_N).max())),
    )


def measure_staleness(oldest_versions: list[int], weight_version: int) -> Staleness:
    """Versions behind, over samples that hold sampled tokens."""
    behind = [weight_version - version for version in oldest_versions]
    return Staleness(
        mean_versions=sum(behind) / max(1, len(behind)),
        max_versions=max(behind, default=0),
        histogram=dict(sorted(Counter(behind).items())),
    )
