"""Report of one optimiser step.

This module does not import torch, so that drivers and reports can read it.

Shapes: N sampled tokens of the step, S samples.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import Field

from ostinato.infra.platform.record import dotted
from ostinato.tasks.records import StageRecord


class Mismatch(StageRecord):
    """Distance between the trainer's log-probabilities and those that the tokens were sampled with."""

    tokens: int
    k1_nats: float = Field(description="mean of log q(rollout) - log p(trainer)")
    k3_nats: float = Field(
        description="mean of r - 1 - log r with r = p(trainer) / q(rollout); never negative"
    )
    p99_ratio: float = Field(description="exp of the 99th percentile of |log r|; 1: no mismatch")
    max_ratio: float = Field(description="exp of the largest |log r|")


class Parity(StageRecord):
    """Mismatch of engine and trainer at equal weights: tokens of each version, scored under that version."""

    one_cache: Mismatch | None = Field(
        description="tokens sampled from a KV cache of their own version; None: not measured"
    )
    kept_cache: Mismatch | None = Field(
        description="tokens sampled from a cache that was kept across a weight update; None: no such tokens"
    )
    tokens_by_age: dict[int, int] = Field(description="versions behind -> tokens compared")
    tokens_not_measured: int = Field(
        description="sampled tokens of versions that are no longer in memory"
    )
    alarm_k3: float = Field(description="k3 of one_cache above which the step raises an alarm")
    alarm_kept_cache_k3: float

    def compared(self) -> list[tuple[str, Mismatch, float]]:
        """Kind of cache, mismatch and its limit, for each kind that was measured."""
        both = (
            ("one", self.one_cache, self.alarm_k3),
            ("kept", self.kept_cache, self.alarm_kept_cache_k3),
        )
        return [(cache, found, limit) for cache, found, limit in both if found is not None]

    def alarms(self) -> list[tuple[str, Mismatch, float]]:
        """Those of `compared` whose k3 is above its limit or not a number."""
        return [item for item in self.compared() if not item[1].k3_nats <= item[2]]


class Staleness(StageRecord):
    """Trainer version minus the oldest weight version in a sample."""

    mean_versions: float
    max_versions: int
    histogram: dict[int, int] = Field(description="versions behind -> samples")


class StepReport(StageRecord):
    """One step of the trainer."""

    step: int = Field(description="optimiser steps taken, this one included")
    weight_version: int = Field(description="version of the weights before the step")
    is_updated: bool = Field(
        description="false: no sample gave a gradient, and weights and optimiser stayed as they were"
    )
    samples: int
    samples_zero_advantage: int = Field(description="advantage exactly 0: no gradient")
    samples_without_tokens: int = Field(description="nothing was sampled: no gradient")
    computed_tokens: int = Field(
        description="tokens of computed samples, prompt and tool results included"
    )
    shared_ratio: float = Field(
        default=0.0, description="share of them that belongs to a prefix shared with another sample"
    )
    padding_ratio: float = Field(description="share of padding among all computed places")
    sampled_tokens: int = Field(description="tokens that carry loss")
    sample_reward_mean: float = Field(description="mean over samples")
    advantage_absolute_mean: float = Field(description="mean over samples")
    loss: float = Field(
        description="policy loss and KL to the reference, without the losses of drafts and hints"
    )
    gradient_norm: float = Field(description="before clipping")
    learning_rate: float = Field(
        default=0.0, description="rate of AdamW in this step, warm-up included; 0: not known"
    )
    entropy_nats: float = Field(description="mean over sampled tokens")
    parity: Parity
    mismatch_all: Mismatch = Field(description="all sampled tokens, scored under weight_version")
    mismatch_without_replay: Mismatch | None = Field(
        default=None,
        description="tokens of weight_version, with the trainer's own routes; None: not requested, or no such tokens",
    )
    staleness: Staleness
    clipped_ratio: float = Field(
        description="share of sampled tokens without a gradient because of the clip band"
    )
    capped_ratio: float = Field(
        description="share of sampled tokens with an importance weight at the cap"
    )
    importance_weight_mean: float
    replaced_routes_ratio: float = Field(
        description="share of replayed routes that the plausibility filter replaced; a shared token counts once"
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
        description="KL(trunk || draft layer), mean over layers and sampled tokens; None: drafts do not learn",
    )
    entropy_coefficient: float = Field(
        default=0.0, description="weight of the entropy bonus; 0: entropy above the floor, or off"
    )
    reference_k1_nats: float = Field(
        description="k1 to the KL reference, mean over trajectories; 0 when off"
    )
    wall_seconds: float
    tokens_per_second: float = Field(description="computed tokens over wall seconds")

    def metrics(self) -> dict[str, float]:
        """All numbers for one line of a metrics file. Nested names are joined by an underscore."""
        flat: dict[str, float] = {
            name.replace(".", "_"): value
            for name, value in dotted(self.model_dump())
            if value is not None and not name.endswith("schema_version")
        }
        return flat | {"parity_alarms": len(self.parity.alarms())}


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Scores per sampled token, in any order."""

    trainer_logprobs_N: np.ndarray
    rollout_logprobs_N: np.ndarray
    weight_versions_N: np.ndarray
    is_kept_cache_N: np.ndarray
    entropy_N: np.ndarray
    draft_kl_N: np.ndarray  # one per draft layer and token; empty: draft layers do not learn
    importance_weights_N: np.ndarray
    is_clipped_N: np.ndarray

    @classmethod
    def concatenate(cls, parts: list["TokenScores"]) -> "TokenScores":
        """The concatenation of all parts. Without parts the arrays are empty."""
        names = cls.__slots__
        if not parts:
            return cls(*(np.zeros(0) for _ in names))
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def mean(values: Sequence[float] | np.ndarray) -> float:
    """Mean of the values, or 0 without values."""
    return float(np.mean(values)) if len(values) else 0.0


def measure_mismatch(trainer_logprobs_N: np.ndarray, rollout_logprobs_N: np.ndarray) -> Mismatch:
    """Statistics of r = p(trainer) / q(rollout) over tokens drawn from q. Without tokens: no mismatch."""
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
    """Staleness of samples with these oldest weight versions."""
    behind = [weight_version - version for version in oldest_versions]
    return Staleness(
        mean_versions=sum(behind) / max(1, len(behind)),
        max_versions=max(behind, default=0),
        histogram=dict(sorted(Counter(behind).items())),
    )
