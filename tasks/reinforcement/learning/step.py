"""One optimiser step on every rank of the trainer, from samples to the step's report.

SPMD, as in Megatron and torchtitan: all ranks get the same samples and make the same calls. Each rank packs all samples
in the same way and computes the microbatches of its place in data parallelism. Gradients are summed over ranks, the
optimiser updates every copy of the weights equally, and all ranks return the same report.

Shapes: B rows, T tokens, N sampled tokens of a microbatch, D model width.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from ostinato.infra.platform.errors import TrainingError
from ostinato.models.network.build import TrainerModel
from ostinato.models.training.allocator import return_free_memory
from ostinato.models.training.batch import TokenBatch
from ostinato.models.training.gradients import LayoutGradients
from ostinato.models.training.schedule import run_microbatches
from ostinato.tasks.records import Sample
from ostinato.tasks.reinforcement.learning.batches.advantages import penalize_divergence
from ostinato.tasks.reinforcement.learning.batches.packing import (
    Microbatch,
    assign_to_ranks,
    pack,
    pad_to_equal_shapes,
)
from ostinato.tasks.reinforcement.learning.batches.scoring import (
    as_tokens,
    score_reference,
    sum_k1_nats,
)
from ostinato.tasks.reinforcement.learning.config import LearningConfig
from ostinato.tasks.reinforcement.learning.hints import HintedRows, hint_divergence, pack_hinted
from ostinato.tasks.reinforcement.learning.objective import entropy_coefficient, microbatch_loss
from ostinato.tasks.reinforcement.learning.parity import (
    EarlierWeights,
    StepParity,
    mismatch_without_replay,
)
from ostinato.tasks.reinforcement.learning.ranks import check_copies_agree, gather_over_ranks
from ostinato.tasks.reinforcement.learning.report import (
    StepReport,
    TokenScores,
    mean,
    measure_mismatch,
    measure_staleness,
)

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Samples of a step as all ranks compute them."""

    samples: Sequence[Sample]
    advantages: list[float]
    has_tokens: list[bool]
    microbatches: list[Microbatch]
    hinted: list[HintedRows]
    entropy_coefficient: float  # 0: the step's entropy is above the floor, or the bonus is off
    reference_k1_nats: float
    is_updated: bool  # false: no sample gives a gradient


@dataclass(slots=True)
class RankResult:
    """Results of one rank's microbatches, by microbatch number. Only the last pipeline stage has losses and scores."""

    losses: dict[int, float] = field(default_factory=dict)
    scores: dict[int, TokenScores] = field(default_factory=dict)
    hint_kl_nats: list[float] = field(default_factory=list)  # sums of the hinted microbatches
    replayed_routes: int = 0
    replaced_routes: int = 0


class PolicyLearner:
    """A rank's copy of the policy, its optimiser and, with a KL penalty, its copy of the reference."""

    def __init__(
        self,
        model: TrainerModel,
        optimizer: torch.optim.Optimizer,
        config: LearningConfig,
        reference: TrainerModel | None = None,
    ) -> None:
        self.model, self.optimizer, self.reference = model, optimizer, reference
        self.config = config
        self._layout = config.parallel_layout
        self._data_rank = self._layout.places()[dist.get_rank()].data
        self.gradients = LayoutGradients(model)

    def step(
        self,
        samples: Sequence[Sample],
        *,
        step: int,
        weight_version: int,
        earlier: EarlierWeights | None = None,
    ) -> StepReport:
        """Takes one step at the optimiser's current rates. Tokens of `earlier` versions are compared under their weights.

        Weights and optimiser stay unchanged if no sample gives a gradient.
        """
        started_at = time.perf_counter()
        batch = self._prepare(samples)

        # engine and trainer are compared before the weights change
        replay = self.config.router_replay
        without_replay = mismatch_without_replay(
            self.model, batch.microbatches, replay, weight_version
        )
        parity = StepParity(self.config, step, weight_version)
        parity.score_earlier(self.model, samples, earlier or {})

        result = self._forward_backward(batch)
        gradient_norm = self._reduce_and_apply(step) if batch.is_updated else 0.0
        return_free_memory()
        check_copies_agree(self.model, self._layout, f"after step {step}")

        results = gather_over_ranks(result)
        leaders = [results[rank] for rank in self._layout.leaders()]
        losses = _in_order([one.losses for one in leaders])
        scores = TokenScores.concatenate(_in_order([one.scores for one in leaders]))
        hint_kl_nats = [nats for one in leaders for nats in one.hint_kl_nats]
        hinted_tokens = sum(int(rows.student.loss_mask_BT.sum()) for rows in batch.hinted)
        real_tokens = sum(one.real_tokens for one in batch.microbatches)
        distinct_tokens = sum(one.distinct_tokens for one in batch.microbatches)
        places = sum(one.places for one in batch.microbatches)
        replayed_routes = sum(one.replayed_routes for one in results)
        wall_seconds = time.perf_counter() - started_at
        return StepReport(
            step=step,
            weight_version=weight_version,
            is_updated=batch.is_updated,
            samples=len(samples),
            samples_zero_advantage=sum(not advantage for advantage in batch.advantages),
            samples_without_tokens=batch.has_tokens.count(False),
            computed_tokens=real_tokens,
            shared_ratio=(real_tokens - distinct_tokens) / max(1, real_tokens),
            padding_ratio=(places - distinct_tokens) / max(1, places),
            sampled_tokens=len(scores.trainer_logprobs_N),
            sample_reward_mean=mean([sample.reward for sample in samples]),
            advantage_absolute_mean=mean(np.abs(batch.advantages)),
            loss=sum(losses, 0.0),
            gradient_norm=gradient_norm,
            entropy_nats=mean(scores.entropy_N),
            parity=parity.measure(samples, scores),
            mismatch_all=measure_mismatch(scores.trainer_logprobs_N, scores.rollout_logprobs_N),
            mismatch_without_replay=without_replay,
            staleness=measure_staleness(
                [s.segment.oldest_version for s in samples if s.segment.sampled_tokens],
                weight_version,
            ),
            clipped_ratio=mean(scores.is_clipped_N),
            capped_ratio=mean(scores.importance_weights_N == self.config.objective.importance_cap),
            importance_weight_mean=mean(scores.importance_weights_N),
            replaced_routes_ratio=sum(one.replaced_routes for one in results)
            / max(1, replayed_routes),
            hinted_samples=sum(len(rows.student.tokens_BT) for rows in batch.hinted),
            hint_kl_nats=sum(hint_kl_nats) / hinted_tokens if hinted_tokens else None,
            draft_kl_nats=mean(scores.draft_kl_N) if self.config.trains_drafts else None,
            entropy_coefficient=batch.entropy_coefficient,
            reference_k1_nats=batch.reference_k1_nats,
            wall_seconds=wall_seconds,
            tokens_per_second=real_tokens / wall_seconds,
        )

    def _prepare(self, samples: Sequence[Sample]) -> StepBatch:
        """Scores the samples under the KL reference, penalises their advantages and packs those that have a gradient."""
        objective, packing = self.config.objective, self.config.row_packing
        advantages, reference_k1_nats = [sample.advantage for sample in samples], 0.0
        if self.reference is not None:
            penalty = penalize_divergence(samples, self.k1_to_reference(samples), objective)
            reference_k1_nats = penalty.mean_k1_nats
            if not objective.has_kl_loss:
                advantages = penalty.advantages
        has_tokens = [sample.segment.sampled_tokens > 0 for sample in samples]
        has_gradient = [bool(a) and t for a, t in zip(advantages, has_tokens, strict=True)]
        bonus = entropy_coefficient(samples, objective)
        has_other_gradient = bool(bonus) or objective.has_kl_loss
        is_skipping = objective.skip_zero_advantage and not has_other_gradient
        chosen = [
            index for index, kept in enumerate(has_gradient if is_skipping else has_tokens) if kept
        ]
        hinted = pack_hinted(samples, packing) if objective.hint_coefficient else []
        return StepBatch(
            samples=samples,
            advantages=advantages,
            has_tokens=has_tokens,
            microbatches=pack(
                [samples[index] for index in chosen],
                [advantages[index] for index in chosen],
                packing,
            ),
            hinted=hinted,
            entropy_coefficient=bonus,
            reference_k1_nats=reference_k1_nats,
            is_updated=any(has_gradient)
            or bool(hinted)
            or (has_other_gradient and any(has_tokens)),
        )

    def k1_to_reference(self, samples: Sequence[Sample]) -> list[float]:
        """For each sample, the sum over its sampled tokens of log q(rollout) - log p(reference)."""
        assert self.reference is not None
        chosen = [index for index, sample in enumerate(samples) if sample.segment.sampled_tokens]
        batches = pack(
            [samples[index] for index in chosen], [0.0] * len(chosen), self.config.row_packing
        )
        own = self._own_microbatches(batches)
        logprobs = score_reference(self.reference, list(own.values()))
        scored = {
            number: sum_k1_nats(batch, logprobs_BT)
            for (number, batch), logprobs_BT in zip(own.items(), logprobs, strict=False)
        }
        scored_by_rank = gather_over_ranks(scored)
        sums = [0.0] * len(samples)
        for rank in self._layout.leaders():
            for number, k1_nats in scored_by_rank[rank].items():
                indices = batches[number].sample_indices_B if number < len(batches) else ()
                for index, k1 in zip(indices, k1_nats, strict=False):  # the rest is padding
                    sums[chosen[index]] = k1
        return sums

    def _own_microbatches(self, batches: Sequence[Microbatch]) -> dict[int, Microbatch]:
        """Microbatches of this rank's place in data parallelism, by number."""
        if self._layout.expert > 1:
            batches = pad_to_equal_shapes(batches, self._layout.data)
        numbers = assign_to_ranks(batches, self._layout.data)[self._data_rank]
        return {number: batches[number] for number in numbers}

    def _forward_backward(self, batch: StepBatch) -> RankResult:
        """Accumulates the gradients of this rank's microbatches and hints. Returns their results."""
        self.model.train()
        self.gradients.clear()
        objective, result = self.config.objective, RankResult()
        own = self._own_microbatches(batch.microbatches)
        references: list[torch.Tensor] = []
        if self.reference is not None and objective.has_kl_loss:
            references = score_reference(self.reference, list(own.values()))
        numbers = list(own)

        def loss(_: TokenBatch, hidden_TBD: torch.Tensor) -> tuple[torch.Tensor, int]:
            place = len(result.losses)
            number, reference_BT = numbers[place], references[place] if references else None
            total, draft_loss, scores = microbatch_loss(
                self.model,
                own[number],
                hidden_TBD,
                self.config,
                batch.entropy_coefficient,
                reference_BT,
            )
            result.losses[number], result.scores[number] = float(total.detach()), scores
            return total + draft_loss, len(scores.rollout_logprobs_N)

        if own:
            rows = [as_tokens(one, self.config.router_replay) for one in own.values()]
            run_microbatches(self.model, rows, loss)
        students = [rows.student for rows in batch.hinted]
        for number in assign_to_ranks(students, self._layout.data)[self._data_rank]:
            kl_nats = hint_divergence(
                self.model, batch.hinted[number], self.config.router_replay
            ).sum()
            (objective.hint_coefficient * kl_nats / objective.loss_divisor_tokens).backward()
            result.hint_kl_nats.append(float(kl_nats.detach()))
        result.replayed_routes, result.replaced_routes = self.model.routers.take_replay_counts()
        return result

    def _reduce_and_apply(self, step: int) -> float:
        """Sums gradients over ranks, clips them and updates the weights. Returns the norm before clipping.

        All ranks see the same norm. If it is not finite, all of them raise TrainingError before any update.
        """
        self.gradients.reduce()
        norm = self.gradients.clip(self.config.optimizer.gradient_clip_norm)
        if not np.isfinite(norm):
            raise TrainingError(
                f"gradient norm is {norm} at step {step}, wanted a finite one; the weights were not changed"
            )
        self.optimizer.step()
        return norm


def _in_order(parts: Sequence[Mapping[int, Value]]) -> list[Value]:
    """Values of all ranks, ordered by microbatch number."""
    merged = {number: value for part in parts for number, value in part.items()}
    return [merged[number] for number in sorted(merged)]
