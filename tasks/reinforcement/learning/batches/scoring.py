"""Hidden states and log-probabilities of a microbatch under the weights of a model.

Shapes: B rows, T tokens, D model width.
"""

from collections.abc import Sequence

import numpy as np
import torch

from ostinato.models.device import current_device, on_device
from ostinato.models.network.build import TrainerModel
from ostinato.models.training.batch import TokenBatch
from ostinato.models.training.schedule import run_microbatches
from ostinato.tasks.reinforcement.learning.batches.packing import Microbatch
from ostinato.tasks.reinforcement.learning.config import RouterReplayConfig


def as_tokens(batch: Microbatch, replay: RouterReplayConfig | None) -> TokenBatch:
    """Inputs of a model for a microbatch. `replay` None: the model's routers choose."""
    is_replayed = replay is not None and replay.enabled
    return TokenBatch(
        torch.from_numpy(batch.tokens_BT),
        torch.from_numpy(batch.loss_mask_BT),
        torch.from_numpy(batch.padding_BT),
        torch.from_numpy(batch.routes_BTLK) if is_replayed else None,
        replay.plausibility_ratio if replay is not None else 0.0,
        batch.tree(),
    )


def compute_hidden(
    model: TrainerModel, batch: Microbatch, replay: RouterReplayConfig | None
) -> torch.Tensor:
    """hidden_TBD of a microbatch with the experts that the engine chose. `replay` None: the model's routers choose."""
    rows = as_tokens(batch, replay).to(current_device())
    return model.forward_hidden(
        rows.tokens_BT,
        rows.routes_BTLK,
        padding_BT=rows.padding_BT,
        plausibility_ratio=rows.plausibility_ratio,
        tree=rows.tree,
    )


def score_batch(
    model: TrainerModel, batch: Microbatch, hidden_TBD: torch.Tensor, *, with_entropy: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logprobs_BT, entropy_BT) of a microbatch's sampled tokens, at the temperatures they were sampled at."""
    return model.score_hidden(
        hidden_TBD,
        on_device(batch.tokens_BT),
        on_device(batch.loss_mask_BT),
        temperature_B=on_device(batch.temperatures_B),
        with_entropy=with_entropy,
    )


@torch.no_grad()
def score_reference(reference: TrainerModel, batches: Sequence[Microbatch]) -> list[torch.Tensor]:
    """logprobs_BT of each microbatch under the KL reference. Empty on all pipeline stages except the last."""
    reference.eval()
    found: list[torch.Tensor] = []

    def loss(_: TokenBatch, hidden_TBD: torch.Tensor) -> tuple[torch.Tensor, int]:
        if len(found) < len(batches):  # the schedule may pad its last round
            scored = score_batch(reference, batches[len(found)], hidden_TBD, with_entropy=False)
            found.append(scored[0])
        return hidden_TBD.new_zeros(()), 0

    if batches:
        rows = [as_tokens(batch, None) for batch in batches]
        run_microbatches(reference, rows, loss, has_backward=False)
    return found


def sum_k1_nats(batch: Microbatch, logprobs_BT: torch.Tensor) -> list[float]:
    """For each row, the sum over its sampled tokens of log q(rollout) - log p, with log p = `logprobs_BT`."""
    difference_BT = np.where(
        batch.loss_mask_BT, batch.rollout_logprobs_BT - logprobs_BT.cpu().numpy(), 0.0
    )
    return [float(row_T.sum(dtype=np.float64)) for row_T in difference_BT]
