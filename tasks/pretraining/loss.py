"""The loss of pretraining: negative log-likelihood of the tokens that the mask names, and that of draft layers."""

import torch
from torch import Tensor

from ostinato.models.network.build import TrainerModel
from ostinato.models.training.batch import TokenBatch
from ostinato.models.training.drafts import draft_divergence
from ostinato.models.training.schedule import Loss


def next_token_loss(model: TrainerModel, draft_weight: float | None = None) -> Loss:
    """Of a microbatch and the hidden states that this rank has of it: nats summed in fp64, and targets.

    `draft_weight`: of the draft layers' divergence from the main head, added to it. At 0 it is added with
    weight 1 and its gradient stops at the draft layers. None: they do not learn.
    """

    def loss(batch: TokenBatch, hidden_TBD: Tensor) -> tuple[Tensor, int]:
        logprobs_C = model.target_logprobs(hidden_TBD, batch.tokens_BT, batch.loss_mask_BT)
        nats = -logprobs_C.sum(dtype=torch.float64)
        if draft_weight is not None:
            rows = hidden_TBD, batch.tokens_BT, batch.loss_mask_BT
            kl_N = draft_divergence(model, *rows, reaches_trunk=draft_weight > 0)
            nats = nats + (draft_weight or 1.0) * kl_N.sum(dtype=torch.float64)
        return nats, len(logprobs_C)

    return loss
