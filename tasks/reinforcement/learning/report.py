"""What one optimiser step says about itself.

Torch-free, so that drivers and reports can read it.

Shapes: N sampled tokens of the step, S samples.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import Field

from ostinato.tasks.records import StageRecord


class Mismatch(StageRecord):
    """Distance of the trainer's log-probabilities from those the tokens were sampled with."""

    tokens: int
    k1_nats: float = Field(description="mean of log q(rollout) - log p(trainer)")
    k3_nats: float = Field(
        description="mean of r - 1 - log r with r = p(trainer) / q(rollout); never negative"
    )
    p99_ratio: float = Field(description="exp of the 99th percentile of |log r|; 1 is none")
    max_ratio: float = Field(description="exp of the largest |log r|")


class Parity(StageRecord):
    """Engine and trainer at equal weights: tokens of each version, scored under that version."""

    one_cache: Mismatch | None = Field(
        description="tokens sampled from a KV cache of their own version; None: not measured"
    )
    kept_cache: Mismatch | None = Field(
        description="tokens sampled from a cache that was kept over a swap of weights; None: none"
    )
    tokens_by_age: dict[int, int] = Field(description="versions behind -> tokens compared")
    tokens_not_measured: int = Field(
        description="sampled tokens of versions that are no longer in memory"
    )
    alarm_k3: float = Field(description="k3 of one_cache above which the step is alarming")
    alarm_kept_cache_k3: float

    def compared(self) -> list[tuple[str, Mismatch, float]]:
        """What was measured: the kind of cache, the mismatch and its limit."""
        both = (
            ("one", self.one_cache, self.alarm_k3),
            ("kept", self.kept_cache, self.alarm_kept_cache_k3),
        )
        return [(cache, found, limit) for cache, found, limit in both if found is not None]

    def alarms(self) -> list[tuple[str, Mismatch, float]]:
        """Of these, what is above its limit or not a number."""
        return [item for item in self.compared() if not item[1].k3_nats <= item[2]]


class Staleness(StageRecord):
    """Trainer version minus the oldest weight version in a sample."""

    mean_versions: float
    max_versions: int
    histogram: dict[int, int] = Field(description="versions behind -> samples")


class StepReport(StageRecord):
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
    shared_ratio: float = Field(
        default=0.0, description="share of them that stands at the beginning of another sample too"
    )
    padding_ratio: float = Field(description="padding over all places that were computed")
    sampled_tokens: int = Field(description="tokens that carry loss")
    sample_reward_mean: float = Field(description="over samples that are trained")
    advantage_absolute_mean: float = Field(description="over samples")
    loss: float = Field(
        description="policy loss and KL to the reference, without the losses of drafts and hints"
    )
    gradient_norm: float = Field(description="before clipping")
    entropy_nats: float = Field(description="mean over sampled tokens")
    parity: Parity
    mismatch_all: Mismatch = Field(description="under weight_version, whatever version sampled")
    mismatch_without_replay: Mismatch | None = Field(
        default=None,
        description="tokens of weight_version, with the trainer's own routes; None: not asked for or none seen",
    )
    staleness: Staleness
    clipped_ratio: float = Field(description="share of sampled tokens outside the clip band")
    capped_ratio: float = Field(
        description="share of sampled tokens whose importance weight was cut"
    )
    importance_weight_mean: float
    replaced_routes_ratio: float = Field(
        description="share of replayed routes the plausibility filter replaced; a token that is computed once counts once"
    )
    hinted_samples: int = Field(
        default=0, description="samples with a turn that was distilled from a hint"
    )
    hint_kl_nats: float | None = Field(
        default=None,
        description="divergence from the hinted policy in nats, mean over tokens; None: no hint",
    )
    draft_kl_nats: float | None = Field(
        default=None,
        description="KL(trunk || draft layer), mean over layers and sampled tokens; None: they do not learn",
    )
    entropy_coefficient: float = Field(
        default=0.0, description="weight of the entropy bonus; 0: above the floor, or none"
    )
    reference_k1_nats: float = Field(
        description="mean over trajectories, to the KL reference; 0 when off"
    )
    wall_seconds: float
    tokens_per_second: float = Field(description="computed tokens over wall seconds")

    def metrics(self) -> dict[str, float]:
        """All numbers under flat names, nested ones joined by an underscore. For one line of a metrics file."""
        flat = dict(_flatten(self.model_dump()))
        return flat | {"parity_alarms": len(self.parity.alarms())}


def _flatten(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}_")
        elif value is not None and name != "schema_version":
            yield f"{prefix}{name}", value


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Scores per sampled token, in any order."""

    trainer_logprobs_N: np.ndarray
    rollout_logprobs_N: np.ndarray
    weight_versions_N: np.ndarray
    is_kept_cache_N: np.ndarray
    entropy_N: np.ndarray
    draft_kl_N: np.ndarray  # of each draft layer at each token; empty: they do not learn
    importance_weights_N: np.ndarray
    is_clipped_N: np.ndarray

    @classmethod
    def concatenate(cls, parts: list["TokenScores"]) -> "TokenScores":
        """All parts as one. Empty arrays when there are none."""
        names = cls.__slots__
        if not parts:
            return cls(*(np.zeros(0) for _ in names))
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def mean(values: Sequence[float] | np.ndarray) -> float:
    """Mean of the values, 0 when there is none."""
    return float(np.mean(values)) if len(values) else 0.0


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
