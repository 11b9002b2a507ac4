"""Logits of a trainer's model, which itself computes log-probabilities in chunks."""

from torch import Tensor

from ostinato.models.network.build import TrainerModel


def forward_logits(model: TrainerModel, tokens_BT: Tensor) -> Tensor:
    """Logits [B, T, V]: row t scores the token after t."""
    return (model.forward_hidden(tokens_BT) @ model.head_VD.T).transpose(0, 1)
