"""The loss of pretraining: negative log-likelihood of the tokens that the mask names."""

import torch
from torch import Tensor

from ostinato.models.network.build import TrainerModel
from ostinato.models.training.batch import TokenBatch
from ostinato.models.training.schedule import Loss


def next_token_loss(model: TrainerModel) -> Loss:
    """Of a microbatch and the hidden states that this rank has of it: nats summed in fp64, and targets."""

    def loss(batch: TokenBatch, hidden_TBD: Tensor) -> tuple[Tensor, int]:
        logprobs_C = model.target_logprobs(hidden_TBD, batch.tokens_BT, batch.loss_mask_BT)
        return -logprobs_C.sum(dtype=torch.float64), len(logprobs_C)

    return loss
