"""Self-distillation: draft layers learn the main head's whole distribution.

It trains nothing itself.

Depth d at position t scores token t+2+d from the trunk's state at t and the tokens up to t+1+d; its
teacher is the main head at position t+1+d, which scores the same token having seen as much.

Shapes: B rows, T tokens, S positions of a depth (time first), C chosen positions, V vocabulary, D
model width.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ostinato.models.device import current_device
from ostinato.models.network.build import TrainerModel
from ostinato.models.training.batch import TokenBatch, held_out_batches, held_out_sources
from ostinato.models.training.objective import distillation_kl
from ostinato.tasks.mtp.config import DraftQuality, MtpConfig


class DistillationLoss:
    """Loss of a microbatch: KL over depths and target tokens; joint: plus the trunk's own."""

    def __init__(self, model: TrainerModel, config: MtpConfig) -> None:
        self.model = model
        self.config = config

    def __call__(self, batch: TokenBatch, hidden_TBD: Tensor) -> tuple[Tensor, int]:
        """Returns the loss summed over target tokens, and their number (those of depth 0)."""
        states = self.model.draft_states(hidden_TBD, batch.tokens_BT)
        total = hidden_TBD.new_zeros(())
        for depth, state_SBD in enumerate(states):
            is_target_SB = batch.loss_mask_BT.T[2 + depth :]
            kl_C, _ = draft_kl(self.model, hidden_TBD, state_SBD, depth, is_target_SB)
            total = total + kl_C.sum()
        if self.config.is_joint:
            logprobs_BT, _ = self.model.score_hidden(
                hidden_TBD, batch.tokens_BT, batch.loss_mask_BT
            )
            total = self.config.draft_weight * total - logprobs_BT.sum()
        return total, int(batch.loss_mask_BT[:, 2:].sum())


def draft_kl(
    model: TrainerModel, hidden_TBD: Tensor, state_SBD: Tensor, depth: int, is_target_SB: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns KL and agreement at the chosen positions of one depth."""
    chosen_C = is_target_SB.reshape(-1).nonzero()[:, 0]
    positions = len(is_target_SB)
    teacher_SBD = hidden_TBD[1 + depth : 1 + depth + positions]
    with torch.no_grad():
        teacher_CD = teacher_SBD.reshape(-1, teacher_SBD.shape[-1]).index_select(0, chosen_C)
        teacher_logprobs_CV = torch.log_softmax(teacher_CD @ model.head_VD.T, dim=-1)
    draft_CD = state_SBD[:positions].reshape(-1, state_SBD.shape[-1]).index_select(0, chosen_C)
    draft_logits_CV = draft_CD @ model.head_VD.T
    agrees_C = draft_logits_CV.detach().argmax(-1) == teacher_logprobs_CV.argmax(-1)
    return distillation_kl(draft_logits_CV, teacher_logprobs_CV), agrees_C


@torch.no_grad()
def measure_drafts(
    model: TrainerModel, corpus_directory: Path, config: MtpConfig, *, step: int
) -> DraftQuality:
    """Measures every depth on every held-out shard. Rows are shared out over the ranks."""
    names = held_out_sources(corpus_directory)
    depths = model.spec.mtp_depth
    sums = torch.zeros(len(names), depths, 3, dtype=torch.float64, device=current_device())
    for index, name in enumerate(names):
        for batch in held_out_batches(
            corpus_directory, name, config.evaluation_row_tokens, config.evaluation_tokens
        ):
            hidden_TBD = model.forward_hidden(batch.tokens_BT)
            for depth, state_SBD in enumerate(model.draft_states(hidden_TBD, batch.tokens_BT)):
                is_target_SB = batch.loss_mask_BT.T[2 + depth :]
                kl_C, agrees_C = draft_kl(model, hidden_TBD, state_SBD, depth, is_target_SB)
                sums[index, depth, :2] += torch.stack((kl_C.sum(), agrees_C.sum()))
                sums[index, depth, 2] += len(kl_C)
    if dist.get_world_size() > 1:
        dist.all_reduce(sums)
    whole = sums.sum(0)
    shares = (sums[:, :, 1] / sums[:, :, 2]).tolist()
    return DraftQuality(
        step=step,
        kl_nats=tuple((whole[:, 0] / whole[:, 2]).tolist()),
        agreement=tuple((whole[:, 1] / whole[:, 2]).tolist()),
        agreement_by_source={name: tuple(share) for name, share in zip(names, shares, strict=True)},
    )
