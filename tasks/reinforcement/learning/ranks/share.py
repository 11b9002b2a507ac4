"""What one rank does of an optimiser step.

`ShareWork`: scores and gradients of the rank's microbatches, the sum over ranks, clipping and the
step, which every rank takes alike.

Shapes: B rows, T tokens, L MoE layers, K experts per token, N sampled tokens of a microbatch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import xxhash

from ostinato.infra.serving.weights.codec import tensor_bits
from ostinato.models.device import on_device
from ostinato.models.network.build import TrainerModel
from ostinato.models.training.allocator import return_free_memory
from ostinato.models.training.batch import TokenBatch
from ostinato.models.training.drafts import draft_divergence
from ostinato.models.training.gradients import LayoutGradients
from ostinato.models.training.objective import k3_nats
from ostinato.models.training.schedule import run_microbatches
from ostinato.tasks.reinforcement.learning.batches.packing import Microbatch
from ostinato.tasks.reinforcement.learning.batches.scoring import as_tokens, score_batch
from ostinato.tasks.reinforcement.learning.config import LearningConfig
from ostinato.tasks.reinforcement.learning.hints import HintedRows, hint_divergence
from ostinato.tasks.reinforcement.learning.objective import entropy_bonus, policy_loss
from ostinato.tasks.reinforcement.learning.report import TokenScores


@dataclass(frozen=True, slots=True)
class StepShare:
    """One rank's part of a step."""

    microbatches: tuple[Microbatch, ...]
    is_updated: bool  # false: no sample has both an advantage and a sampled token, none a hint
    hinted: tuple[HintedRows, ...] = ()
    entropy_coefficient: float = 0.0  # 0: the step's entropy is above its floor


@dataclass(frozen=True, slots=True)
class ShareResult:
    """Result of one rank's share of a step. Losses and scores are parallel to its microbatches."""

    losses: tuple[float, ...]
    scores: tuple[TokenScores, ...]
    num_replayed: int
    num_replaced: int
    # of the sum over all ranks, before clipping; not finite: the step was refused
    gradient_norm: float
    weights_checksum: str  # after the step; empty where there is one rank
    hint_kl_nats: tuple[float, ...] = ()  # sum over tokens, parallel to the hinted rows


@dataclass(slots=True)
class ShareWork:
    """The part of one rank in the update of one model by one optimiser."""

    model: TrainerModel
    optimizer: torch.optim.Optimizer
    config: LearningConfig
    reference: TrainerModel | None = None
    _gradients: LayoutGradients = field(init=False)

    def __post_init__(self) -> None:
        self._gradients = LayoutGradients(self.model)

    def run(self, share: StepShare) -> ShareResult:
        """Computes the share and takes the step together with the other ranks, which must all run theirs."""
        self.model.train()
        self._gradients.clear()
        parts = self._accumulate(share)
        hint_kl_nats = tuple(self._distil(rows) for rows in share.hinted)
        gradient_norm = self._apply() if share.is_updated else 0.0
        num_replayed, num_replaced = self.model.routers.take_replay_counts()
        return_free_memory()
        return ShareResult(
            losses=tuple(loss for loss, _ in parts),
            scores=tuple(scores for _, scores in parts),
            num_replayed=num_replayed,
            num_replaced=num_replaced,
            gradient_norm=gradient_norm,
            weights_checksum=checksum_weights(self.model) if self.config.world_size > 1 else "",
            hint_kl_nats=hint_kl_nats,
        )

    def _distil(self, rows: HintedRows) -> float:
        """Adds the gradient of the divergence from the hinted policy. Returns its sum in nats."""
        objective = self.config.objective
        kl_nats = hint_divergence(self.model, rows, self.config.router_replay).sum()
        (objective.hint_coefficient * kl_nats / objective.loss_divisor_tokens).backward()
        return float(kl_nats.detach())

    def _accumulate(self, share: StepShare) -> list[tuple[float, TokenScores]]:
        """Adds the gradients of the microbatches. Returns their losses and the scores of their sampled tokens,
        on the last stage of a pipeline alone.
        """
        batches, found = share.microbatches, []
        reference = self.reference if self.config.objective.has_kl_loss else None
        references = None if reference is None else score_reference(reference, batches)

        def loss(_: TokenBatch, hidden_TBD: torch.Tensor) -> tuple[torch.Tensor, int]:
            number = len(found)
            reference_BT = None if references is None else references[number]
            total, draft_kl_N, scores = self._score(
                batches[number], hidden_TBD, share.entropy_coefficient, reference_BT
            )
            found.append((float(total.detach()), scores))
            if self.config.trains_drafts:  # a gradient of the draft layers alone
                total = total + draft_kl_N.sum() / self.config.objective.loss_divisor_tokens
            return total, len(scores.rollout_logprobs_N)

        if batches:
            rows = [as_tokens(batch, self.config.router_replay) for batch in batches]
            run_microbatches(self.model, rows, loss)
        return found

    def _score(
        self,
        batch: Microbatch,
        hidden_TBD: torch.Tensor,
        entropy_coefficient: float,
        reference_BT: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, TokenScores]:
        """Loss of a microbatch, divergence of the draft layers and scores of its sampled tokens."""
        mask_BT = on_device(batch.loss_mask_BT)
        logprobs_BT, entropy_BT = score_batch(self.model, batch, hidden_TBD)
        logprobs_N = logprobs_BT[mask_BT]
        rollout_logprobs_N = batch.rollout_logprobs_BT[batch.loss_mask_BT]
        advantages_BT = np.broadcast_to(batch.advantages_B[:, None], batch.tokens_BT.shape)
        advantages_N = on_device(advantages_BT[batch.loss_mask_BT])
        if entropy_coefficient:
            bonus_N = entropy_bonus(logprobs_N, entropy_BT[mask_BT], entropy_coefficient)
            advantages_N = advantages_N + bonus_N
        config = self.config.objective
        objective = policy_loss(logprobs_N, on_device(rollout_logprobs_N), advantages_N, config)
        total = objective.total
        if reference_BT is not None:
            kl_N = k3_nats(logprobs_N, reference_BT[mask_BT])
            total = total + config.kl_coefficient * kl_N.sum() / config.loss_divisor_tokens
        draft_kl_N = logprobs_N.new_zeros(0)
        if self.config.trains_drafts:
            rows = on_device(batch.tokens_BT), mask_BT
            draft_kl_N = draft_divergence(self.model, hidden_TBD, *rows)
        scores = TokenScores(
            trainer_logprobs_N=logprobs_N.detach().cpu().numpy(),
            rollout_logprobs_N=rollout_logprobs_N,
            weight_versions_N=batch.weight_versions_BT[batch.loss_mask_BT],
            is_kept_cache_N=batch.is_kept_cache_BT[batch.loss_mask_BT],
            entropy_N=entropy_BT.detach()[mask_BT].cpu().numpy(),
            draft_kl_N=draft_kl_N.detach().cpu().numpy(),
            importance_weights_N=objective.importance_weights_N.cpu().numpy(),
            is_clipped_N=objective.is_clipped_N.cpu().numpy(),
        )
        return total, draft_kl_N, scores

    def _apply(self) -> float:
        """Sums over ranks, clips and takes the optimiser step. Returns the norm before clipping.

        All ranks see the same sum: a norm that is not finite leaves weights and optimiser alone on each of them.
        """
        self._gradients.reduce()
        norm = self._gradients.clip(self.config.optimizer.gradient_clip_norm)
        if np.isfinite(norm):
            self.optimizer.step()
        return norm


@torch.no_grad()
def score_reference(reference: TrainerModel, batches: Sequence[Microbatch]) -> list[torch.Tensor]:
    """By microbatch logprobs_BT under the KL reference. Empty on stages of a pipeline before the last."""
    reference.eval()
    found: list[torch.Tensor] = []

    def loss(_: TokenBatch, hidden_TBD: torch.Tensor) -> tuple[torch.Tensor, int]:
        if len(found) < len(batches):  # the schedule may fill its last round
            scored = score_batch(reference, batches[len(found)], hidden_TBD, with_entropy=False)
            found.append(scored[0])
        return hidden_TBD.new_zeros(()), 0

    if batches:
        rows = [as_tokens(batch, None) for batch in batches]
        run_microbatches(reference, rows, loss, has_backward=False)
    return found


def sum_rows_k1(reference: TrainerModel, batches: Sequence[Microbatch]) -> list[list[float]]:
    """By microbatch and row, the sum over sampled tokens of log q(rollout) - log p(reference). Empty as
    `score_reference` is.
    """
    sums = []
    for batch, logprobs_BT in zip(batches, score_reference(reference, batches), strict=False):
        difference_BT = np.where(
            batch.loss_mask_BT, batch.rollout_logprobs_BT - logprobs_BT.cpu().numpy(), 0.0
        )
        sums.append([float(row_T.sum(dtype=np.float64)) for row_T in difference_BT])
    return sums


def checksum_weights(model: TrainerModel) -> str:
    """Equal on two ranks if, and only if, their weights and adapters are, bit for bit."""
    state = xxhash.xxh3_128()
    for tensor in (model.canonical_tensors() | model.adapters.state_dict()).values():
        state.update(tensor_bits(tensor.detach().cpu()).data)
    return state.hexdigest()
