"""Losses of the first steps of a model, for tests that compare two ways to compute them."""

from torch import Tensor

from ostinato.models.network.build import TrainerModel
from ostinato.models.training.optimizer import build_optimizer
from ostinato.models.training.optimizer_config import OptimizerConfig


def losses_of_steps(model: TrainerModel, tokens_BT: Tensor, steps: int) -> list[float]:
    """Mean loss before each AdamW step over one batch. A pass without a step comes first: FP8 with delayed scaling
    takes its scales from passes before.
    """
    optimizer = build_optimizer(model, OptimizerConfig(kind="adamw"))
    losses = []
    for step in range(steps + 1):
        loss = -model.token_logprobs(tokens_BT).mean()
        model.zero_grad()
        loss.backward()
        if step > 0:
            losses.append(loss.item())
            optimizer.step()
    return losses
