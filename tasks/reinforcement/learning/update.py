"""One optimiser step from a list of samples.

The order of things: which samples are computed, microbatches, who computes which, and the report of
what was measured on the way. It neither builds models nor publishes; `ranks/share.py` computes.

Shapes: B rows, T tokens, N sampled tokens of a microbatch.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch

from ostinato.infra.platform.errors import TrainingError
from ostinato.models.network.build import TrainerModel
from ostinato.tasks.records import Sample
from ostinato.tasks.reinforcement.learning.batches.packing import Microbatch, deal, even_out, pack
from ostinato.tasks.reinforcement.learning.batches.scoring import compute_hidden, score_batch
from ostinato.tasks.reinforcement.learning.config import LearningConfig, ObjectiveConfig
from ostinato.tasks.reinforcement.learning.hints import HintedRows, pack_hinted
from ostinato.tasks.reinforcement.learning.parity import StepParity
from ostinato.tasks.reinforcement.learning.ranks.share import ShareResult, ShareWork, StepShare
from ostinato.tasks.reinforcement.learning.report import (
    Mismatch,
    StepReport,
    TokenScores,
    measure_mismatch,
    measure_staleness,
)

# Runs one share at each place in data parallelism; answers in the same order.
RunShares = Callable[[list[StepShare]], list[ShareResult]]
# By microbatch and row, k1 to the reference.
ScoreRows = Callable[[Sequence[Microbatch]], list[list[float]]]

Part = TypeVar("Part")


class PolicyUpdate:
    """The update of one model by one optimiser. `run_shares` lets other ranks take part (None: there are none)."""

    def __init__(
        self,
        model: TrainerModel,
        optimizer: torch.optim.Optimizer,
        config: LearningConfig,
        run_shares: RunShares | None = None,
    ) -> None:
        self._model = model
        self._config = config
        if run_shares is None:
            work = ShareWork(model, optimizer, config)
            run_shares = lambda shares: [work.run(share) for share in shares]  # noqa: E731
        self._run_shares = run_shares

    def step(
        self,
        samples: Sequence[Sample],
        *,
        step: int,
        weight_version: int,
        advantages: Sequence[float] | None = None,
        reference_k1_nats: float = 0.0,
        earlier_weights: Mapping[int, Mapping[str, torch.Tensor]] | None = None,
    ) -> StepReport:
        """Takes one step at the optimiser's current rates. `advantages` (after a KL penalty) replace the samples'.
        `earlier_weights`: by version, to compare older tokens under.

        Without any sample that has both an advantage and a sampled token, weights and optimiser stay as they are.
        """
        started_at = time.perf_counter()
        advantages = (
            [sample.advantage for sample in samples] if advantages is None else list(advantages)
        )
        has_tokens = [sample.segment.sampled_tokens > 0 for sample in samples]
        is_live = [bool(a) and t for a, t in zip(advantages, has_tokens, strict=True)]
        objective = self._config.objective
        entropy_coefficient = _entropy_coefficient(samples, objective)
        has_other_gradient = bool(entropy_coefficient) or objective.has_kl_loss
        is_skipping = objective.skip_zero_advantage and not has_other_gradient
        is_computed = is_live if is_skipping else has_tokens
        chosen = [index for index, wanted in enumerate(is_computed) if wanted]
        packing = self._config.row_packing
        microbatches = pack(
            [samples[index] for index in chosen], [advantages[index] for index in chosen], packing
        )
        without_replay = self._mismatch_without_replay(microbatches, weight_version)
        parity = StepParity(self._config, step, weight_version)
        parity.score_earlier(self._model, samples, earlier_weights or {})  # before weights move
        hinted = pack_hinted(samples, packing) if objective.hint_coefficient else []
        is_updated = any(is_live) or bool(hinted) or has_other_gradient
        plan = StepShare(tuple(microbatches), is_updated, tuple(hinted), entropy_coefficient)
        results, loss, scores = self._compute(plan, step)
        computed_tokens = sum(batch.real_tokens for batch in microbatches)
        shared_ratio, padding_ratio = _token_shares(microbatches)
        weights_N = scores.importance_weights_N
        wall_seconds = time.perf_counter() - started_at
        return StepReport(
            step=step,
            weight_version=weight_version,
            is_updated=is_updated,
            samples=len(samples),
            samples_zero_advantage=sum(not advantage for advantage in advantages),
            samples_without_tokens=has_tokens.count(False),
            computed_tokens=computed_tokens,
            shared_ratio=shared_ratio,
            padding_ratio=padding_ratio,
            sampled_tokens=len(scores.trainer_logprobs_N),
            sample_reward_mean=_mean([sample.reward for sample in samples]),
            advantage_absolute_mean=_mean(np.abs(advantages)),
            loss=loss,
            gradient_norm=results[0].gradient_norm,
            entropy_nats=_mean(scores.entropy_N),
            parity=parity.measure(samples, scores),
            mismatch_all=measure_mismatch(scores.trainer_logprobs_N, scores.rollout_logprobs_N),
            mismatch_without_replay=without_replay,
            staleness=measure_staleness(
                [s.segment.oldest_version for s, t in zip(samples, has_tokens, strict=True) if t],
                weight_version,
            ),
            clipped_ratio=_mean(scores.is_clipped_N),
            capped_ratio=_mean(weights_N == self._config.objective.importance_cap),
            importance_weight_mean=_mean(weights_N),
            replaced_routes_ratio=sum(result.num_replaced for result in results)
            / max(1, sum(result.num_replayed for result in results)),
            hinted_samples=sum(len(rows.student.tokens_BT) for rows in hinted),
            hint_kl_nats=_hint_kl(results, hinted),
            draft_kl_nats=_mean(scores.draft_kl_N) if self._config.trains_drafts else None,
            entropy_coefficient=entropy_coefficient,
            reference_k1_nats=reference_k1_nats,
            wall_seconds=wall_seconds,
            tokens_per_second=computed_tokens / wall_seconds if wall_seconds > 0 else 0.0,
        )

    def _compute(self, plan: StepShare, step: int) -> tuple[list[ShareResult], float, TokenScores]:
        """Lets the ranks compute. Returns their results, the loss and the scores of all sampled tokens."""
        layout = self._config.parallel_layout
        microbatches: Sequence[Microbatch] = plan.microbatches
        if layout.expert > 1:
            microbatches = even_out(microbatches, layout.data)
        places = deal(microbatches, layout.data)
        hinted = deal([rows.student for rows in plan.hinted], layout.data)
        results = self._run_shares(
            [
                replace(
                    plan,
                    microbatches=tuple(microbatches[index] for index in place),
                    hinted=tuple(plan.hinted[index] for index in hinted_place),
                )
                for place, hinted_place in zip(places, hinted, strict=True)
            ]
        )
        norm = results[0].gradient_norm
        if not np.isfinite(norm):
            raise TrainingError(
                f"gradient norm is {norm} at step {step}, wanted a finite one; the weights were not touched"
            )
        losses = in_order(places, [result.losses for result in results])
        scores = in_order(places, [result.scores for result in results])
        return results, sum(losses, 0.0), TokenScores.concatenate(scores)

    @torch.no_grad()
    def _mismatch_without_replay(
        self, microbatches: Sequence[Microbatch], weight_version: int
    ) -> Mismatch | None:
        """Mismatch of the same weights' log-probs on their own routes: the worth of replay."""
        wanted_tokens = self._config.router_replay.compared_tokens
        if not wanted_tokens:
            return None
        self._model.train()
        trainer, rollout, seen_tokens = [], [], 0
        for batch in microbatches:
            if seen_tokens >= wanted_tokens:
                break
            hidden_TBD = compute_hidden(self._model, batch, None)
            logprobs_BT, _ = score_batch(self._model, batch, hidden_TBD, with_entropy=False)
            equal_BT = batch.loss_mask_BT & (batch.weight_versions_BT == weight_version)
            trainer.append(logprobs_BT.cpu().numpy()[equal_BT])
            rollout.append(batch.rollout_logprobs_BT[equal_BT])
            seen_tokens += int(equal_BT.sum())
        if not seen_tokens:
            return None
        return measure_mismatch(np.concatenate(trainer), np.concatenate(rollout))


def gather_k1(
    samples: Sequence[Sample], config: LearningConfig, score_rows: ScoreRows
) -> list[float]:
    """Per sample, the sum over its sampled tokens of log q(rollout) - log p(reference), which `score_rows` gives
    for rows of microbatches.
    """
    sums = [0.0] * len(samples)
    chosen = [index for index, sample in enumerate(samples) if sample.segment.sampled_tokens]
    picked = [samples[index] for index in chosen]
    batches = pack(picked, [0.0] * len(picked), config.row_packing)
    for batch, rows in zip(batches, score_rows(batches), strict=True):
        for index, k1 in zip(batch.sample_indices_B, rows, strict=True):
            sums[chosen[index]] = k1
    return sums


def in_order(places: Sequence[Sequence[int]], parts: Sequence[Sequence[Part]]) -> list[Part]:
    """Results of the ranks in the microbatches' own order."""
    pairs = [
        pair
        for place, part in zip(places, parts, strict=True)
        for pair in zip(place, part, strict=True)
    ]
    return [part for _, part in sorted(pairs, key=lambda pair: pair[0])]


def _entropy_coefficient(samples: Sequence[Sample], objective: ObjectiveConfig) -> float:
    """Weight of the entropy bonus. Surprise of sampled tokens estimates entropy before any forward pass."""
    if objective.entropy_floor_nats is None:
        return 0.0
    logprobs = [sample.segment.logprobs_T[sample.segment.loss_mask_T] for sample in samples]
    surprise_N = -np.concatenate(logprobs)
    is_below = len(surprise_N) > 0 and float(surprise_N.mean()) < objective.entropy_floor_nats
    return objective.entropy_coefficient if is_below else 0.0


def _hint_kl(results: Sequence[ShareResult], hinted: Sequence[HintedRows]) -> float | None:
    tokens = sum(int(rows.student.loss_mask_BT.sum()) for rows in hinted)
    if not tokens:
        return None
    return sum(nats for result in results for nats in result.hint_kl_nats) / tokens


def _token_shares(microbatches: Sequence[Microbatch]) -> tuple[float, float]:
    """Shares of the samples' tokens that are computed once for several, and of places that are padding."""
    distinct_tokens = sum(batch.distinct_tokens for batch in microbatches)
    real_tokens = sum(batch.real_tokens for batch in microbatches)
    places = sum(batch.places for batch in microbatches)
    return 1 - distinct_tokens / max(1, real_tokens), 1 - distinct_tokens / max(1, places)


def _mean(values: Sequence[float] | np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else 0.0
