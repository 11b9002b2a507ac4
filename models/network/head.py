"""Log-probabilities from the states before the output matrix.

Shapes: B batch, T tokens, N positions, C chosen positions, V vocabulary, D model width.
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from torch import Tensor

from ostinato.kernels.logprobs.op import token_logprobs
from ostinato.models.network.parallel.shards import find_cuts


def score_tokens(
    hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies, with the vocabulary on one rank or cut over several."""
    if not find_cuts(head_VD):
        return token_logprobs(hidden_ND, head_VD, targets_N, with_entropy=with_entropy)
    if len(targets_N) == 0:  # still a part of the graph: other ranks' experts wait for it
        return hidden_ND.sum(-1), hidden_ND.new_zeros(0)
    logits_NV = hidden_ND @ head_VD.T  # of this rank's stretch of the vocabulary
    entropy_N = (
        _entropy_of_cut(logits_NV.detach()) if with_entropy else logits_NV.new_zeros(len(targets_N))
    )
    return -vocab_parallel_cross_entropy(logits_NV, targets_N), entropy_N


def score_rows(
    hidden_TBD: Tensor,
    head_VD: Tensor,
    tokens_BT: Tensor,
    mask_BT: Tensor | None,
    *,
    with_entropy: bool,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of whole rows, [B, T] each. Zeros at first tokens and where
    `mask_BT` is False, whose positions never meet the output matrix.
    """
    batch, num_tokens = tokens_BT.shape
    hidden_ND = hidden_TBD[:-1].reshape(-1, hidden_TBD.shape[-1])
    targets_N = tokens_BT.T[1:].reshape(-1)
    if mask_BT is None:
        logprobs_N, entropy_N = score_tokens(hidden_ND, head_VD, targets_N, with_entropy)
    else:
        chosen_C = mask_BT.T[1:].reshape(-1).nonzero()[:, 0]
        logprobs_C, entropy_C = score_tokens(
            hidden_ND.index_select(0, chosen_C),
            head_VD,
            targets_N.index_select(0, chosen_C),
            with_entropy,
        )
        zeros_N = hidden_ND.new_zeros(targets_N.shape)
        logprobs_N = zeros_N.index_put((chosen_C,), logprobs_C)
        entropy_N = zeros_N.index_put((chosen_C,), entropy_C)
    first_B1 = hidden_ND.new_zeros(batch, 1)
    shape = (num_tokens - 1, batch)
    return (
        torch.cat((first_B1, logprobs_N.view(shape).T), dim=1),
        torch.cat((first_B1, entropy_N.view(shape).T), dim=1),
    )


def _entropy_of_cut(logits_NV: Tensor) -> Tensor:
    """Entropies in nats of a vocabulary that is cut over the ranks of tensor parallelism."""
    group = parallel_state.get_tensor_model_parallel_group()
    highest_N = logits_NV.amax(-1)
    dist.all_reduce(highest_N, dist.ReduceOp.MAX, group=group)
    shifted_NV = logits_NV - highest_N[:, None]
    weights_NV = shifted_NV.exp()
    sums_2N = torch.stack((weights_NV.sum(-1), (weights_NV * shifted_NV).sum(-1)))
    dist.all_reduce(sums_2N, group=group)
    return sums_2N[0].log() - sums_2N[1] / sums_2N[0]
