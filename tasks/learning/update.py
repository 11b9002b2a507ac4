"""One optimiser step from a list of samples.

Owns the order of things: which samples are computed, microbatches, gradients, clipping, the step,
and what is measured on the way. Enters: a trainer model, its optimiser, samples. Leaves: moved
weights and a StepReport. It neither builds models nor publishes.

Shapes: B rows, T tokens, L MoE layers, K experts a token, N sampled tokens of a microbatch.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from infra.errors import TrainingError
from models.build import TrainerModel
from tasks.learning.config import LearningConfig, RouterReplayConfig
from tasks.learning.objective import policy_loss
from tasks.learning.packing import Microbatch, pack
from tasks.learning.report import (
    Mismatch,
    StepReport,
    TokenScores,
    measure_mismatch,
    measure_staleness,
)
from tasks.records import Sample


class PolicyUpdate:
    """The update of one model by one optimiser."""

    def __init__(
        self,
        model: TrainerModel,
        optimizer: torch.optim.Optimizer,
        config: LearningConfig,
        clock: Callable[[], float],
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._config = config
        self._clock = clock

    def step(
        self,
        samples: Sequence[Sample],
        *,
        step: int,
        weight_version: int,
        advantages: Sequence[float] | None = None,
        reference_k1_nats: float = 0.0,
    ) -> StepReport:
        """Takes one step at the optimiser's current rates. `advantages` (after a KL penalty) replace the samples'.

        Without any sample that has both an advantage and a sampled token, weights and optimiser stay as they are.
        """
        started_at = self._clock()
        advantages = (
            [sample.advantage for sample in samples] if advantages is None else list(advantages)
        )
        has_tokens = [sample.segment.sampled_tokens > 0 for sample in samples]
        is_live = [bool(a) and t for a, t in zip(advantages, has_tokens, strict=True)]
        is_computed = is_live if self._config.objective.skip_zero_advantage else has_tokens
        chosen = [index for index, wanted in enumerate(is_computed) if wanted]
        microbatches = pack(
            [samples[index] for index in chosen],
            [advantages[index] for index in chosen],
            self._config.packing,
        )
        without_replay = self._mismatch_without_replay(microbatches, weight_version)
        loss, scores = self._accumulate(microbatches)
        gradient_norm = 0.0
        if any(is_live):
            gradient_norm = self._apply(step)
        equal_version = scores.weight_versions_N == weight_version
        equal = measure_mismatch(
            scores.trainer_logprobs_N[equal_version], scores.rollout_logprobs_N[equal_version]
        )
        places = sum(batch.tokens_BT.size for batch in microbatches)
        computed_tokens = sum(batch.real_tokens for batch in microbatches)
        weights_N = scores.importance_weights_N
        wall_seconds = self._clock() - started_at
        return StepReport(
            step=step,
            weight_version=weight_version,
            is_updated=any(is_live),
            samples=len(samples),
            samples_zero_advantage=sum(not advantage for advantage in advantages),
            samples_without_tokens=has_tokens.count(False),
            computed_tokens=computed_tokens,
            padding_ratio=1 - computed_tokens / max(1, places),
            sampled_tokens=len(scores.trainer_logprobs_N),
            reward_mean=_mean([sample.reward for sample in samples]),
            advantage_absolute_mean=_mean(np.abs(advantages)),
            loss=loss,
            gradient_norm=gradient_norm,
            entropy_nats=_mean(scores.entropy_N),
            mismatch_equal_version=equal,
            mismatch_all=measure_mismatch(scores.trainer_logprobs_N, scores.rollout_logprobs_N),
            mismatch_without_replay=without_replay,
            is_mismatch_alarming=not equal.k3_nats <= self._config.mismatch_alarm_k3,  # NaN too
            staleness=measure_staleness(
                [s.segment.oldest_version for s, t in zip(samples, has_tokens, strict=True) if t],
                weight_version,
            ),
            clipped_ratio=_mean(scores.is_clipped_N),
            capped_ratio=_mean(weights_N == self._config.objective.importance_cap),
            importance_weight_mean=_mean(weights_N),
            replaced_routes_ratio=self._model.replaced_ratio(),
            reference_k1_nats=reference_k1_nats,
            wall_seconds=wall_seconds,
            tokens_per_second=computed_tokens / wall_seconds if wall_seconds > 0 else 0.0,
        )

    def _accumulate(self, microbatches: Sequence[Microbatch]) -> tuple[float, TokenScores]:
        """Adds all gradients up. Returns the loss and the scores of all sampled tokens."""
        self._model.train()
        self._optimizer.zero_grad(set_to_none=True)
        loss, parts = 0.0, []
        for batch in microbatches:
            mask_BT = torch.from_numpy(batch.loss_mask_BT)
            logprobs_BT, entropy_BT = self._model.token_logprobs_and_entropy(
                torch.from_numpy(batch.tokens_BT),
                _routes(batch, self._config.router_replay),
                mask_BT=mask_BT,
                padding_BT=torch.from_numpy(batch.padding_BT),
                plausibility_ratio=self._config.router_replay.plausibility_ratio,
            )
            logprobs_N = logprobs_BT[mask_BT]
            rollout_logprobs_N = batch.rollout_logprobs_BT[batch.loss_mask_BT]
            advantages_BT = np.broadcast_to(batch.advantages_B[:, None], batch.tokens_BT.shape)
            objective = policy_loss(
                logprobs_N,
                torch.from_numpy(rollout_logprobs_N),
                torch.from_numpy(advantages_BT[batch.loss_mask_BT]),
                self._config.objective,
            )
            objective.total.backward()
            loss += float(objective.total.detach())
            parts.append(
                TokenScores(
                    trainer_logprobs_N=logprobs_N.detach().numpy(),
                    rollout_logprobs_N=rollout_logprobs_N,
                    weight_versions_N=batch.weight_versions_BT[batch.loss_mask_BT],
                    entropy_N=entropy_BT.detach()[mask_BT].numpy(),
                    importance_weights_N=objective.importance_weights_N.numpy(),
                    is_clipped_N=objective.is_clipped_N.numpy(),
                )
            )
        return loss, TokenScores.concatenate(parts)

    @torch.no_grad()
    def _mismatch_without_replay(
        self, microbatches: Sequence[Microbatch], weight_version: int
    ) -> Mismatch | None:
        """What replay is worth: the same weights' log-probs on their own routes, over the first microbatches."""
        wanted_tokens = self._config.router_replay.compared_tokens
        if not wanted_tokens:
            return None
        self._model.train()
        trainer, rollout, seen_tokens = [], [], 0
        for batch in microbatches:
            if seen_tokens >= wanted_tokens:
                break
            mask_BT = torch.from_numpy(batch.loss_mask_BT)
            logprobs_BT = self._model.token_logprobs(
                torch.from_numpy(batch.tokens_BT),
                mask_BT=mask_BT,
                padding_BT=torch.from_numpy(batch.padding_BT),
            )
            equal_BT = batch.loss_mask_BT & (batch.weight_versions_BT == weight_version)
            trainer.append(logprobs_BT.numpy()[equal_BT])
            rollout.append(batch.rollout_logprobs_BT[equal_BT])
            seen_tokens += int(equal_BT.sum())
        if not trainer:
            return measure_mismatch(np.zeros(0), np.zeros(0))
        return measure_mismatch(np.concatenate(trainer), np.concatenate(rollout))

    def _apply(self, step: int) -> float:
        """Clips and takes the optimiser step. Returns the norm before clipping."""
        limit = self._config.optimizer.gradient_clip_norm
        parameters = [weight for weight in self._model.parameters() if weight.grad is not None]
        norm = float(
            torch.nn.utils.clip_grad_norm_(parameters, float("inf") if limit is None else limit)
        )
        if not np.isfinite(norm):
            self._optimizer.zero_grad(set_to_none=True)
            raise TrainingError(
                f"gradient norm is {norm} at step {step}, wanted a finite one; the weights were not touched"
            )
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm


@torch.no_grad()
def sum_k1(
    reference: TrainerModel, samples: Sequence[Sample], config: LearningConfig
) -> list[float]:
    """Per sample, the sum over its sampled tokens of log q(rollout) - log p(reference)."""
    reference.eval()
    sums = [0.0] * len(samples)
    chosen = [index for index, sample in enumerate(samples) if sample.segment.sampled_tokens]
    picked = [samples[index] for index in chosen]
    for batch in pack(picked, [0.0] * len(picked), config.packing):
        mask_BT = torch.from_numpy(batch.loss_mask_BT)
        logprobs_BT = reference.token_logprobs(torch.from_numpy(batch.tokens_BT), mask_BT=mask_BT)
        difference_BT = np.where(
            batch.loss_mask_BT, batch.rollout_logprobs_BT - logprobs_BT.numpy(), 0.0
        )
        for row, index in enumerate(batch.sample_indices_B):
            sums[chosen[index]] = float(difference_BT[row].sum(dtype=np.float64))
    return sums


def _routes(batch: Microbatch, config: RouterReplayConfig) -> torch.Tensor | None:
    return torch.from_numpy(batch.routes_BTLK) if config.enabled else None


def _mean(values: Sequence[float] | np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else 0.0
