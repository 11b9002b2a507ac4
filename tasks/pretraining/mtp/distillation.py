"""The loss of draft layers, and their agreement with the main head on held-out text.

It trains nothing itself.

Shapes: B rows, T tokens, D model width, C chosen positions, N positions of all depths.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ostinato.models.device import current_device
from ostinato.models.network.build import TrainerModel
from ostinato.models.training.batch import TokenBatch, held_out_batches, held_out_sources
from ostinato.models.training.drafts import compare_drafts, draft_divergence
from ostinato.models.training.schedule import Loss
from ostinato.tasks.pretraining.mtp.config import DraftQuality, MtpConfig


def distillation_loss(model: TrainerModel) -> Loss:
    """Of a microbatch: KL summed over depths and target tokens, and the number of those of depth 0."""

    def loss(batch: TokenBatch, hidden_TBD: Tensor) -> tuple[Tensor, int]:
        kl_N = draft_divergence(model, hidden_TBD, batch.tokens_BT, batch.loss_mask_BT)
        return kl_N.sum(), int(batch.loss_mask_BT[:, 2:].sum())

    return loss


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
            found = compare_drafts(model, hidden_TBD, batch.tokens_BT, batch.loss_mask_BT)
            for depth, (kl_C, agrees_C) in enumerate(found):
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
