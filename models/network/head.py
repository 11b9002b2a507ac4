"""Log-probabilities from the hidden states before the output matrix.

Shapes: B batch, T tokens, N positions, C chosen positions, V vocabulary, D model width.
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from torch import Tensor

from ostinato.kernels.logprobs.op import token_logprobs
from ostinato.models.network.parallel.context import gather_scores, local_rows
from ostinato.models.network.parallel.shards import find_cuts


def head_logits(hidden_ND: Tensor, head_VD: Tensor) -> Tensor:
    """Logits in fp32 or wider. Under bf16 autocast they are rounded to bf16 first, as in Megatron."""
    logits_NV = hidden_ND @ head_VD.T
    return logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))


def score_tokens(
    hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies, with the vocabulary on one rank or sharded over several."""
    if not find_cuts(head_VD):
        return token_logprobs(hidden_ND, head_VD, targets_N, with_entropy=with_entropy)
    if len(targets_N) == 0:  # stays in the graph, since other ranks' experts wait for its backward
        return hidden_ND.sum(-1), hidden_ND.new_zeros(0)
    logits_NV = head_logits(hidden_ND, head_VD)  # of this rank's part of the vocabulary
    entropy_N = (
        _entropy_of_cut(logits_NV.detach()) if with_entropy else logits_NV.new_zeros(len(targets_N))
    )
    return -vocab_parallel_cross_entropy(logits_NV, targets_N), entropy_N


def local_targets(tokens_BT: Tensor, mask_BT: Tensor | None) -> tuple[Tensor, Tensor]:
    """(targets_N, chosen_C) of this rank's positions, time first: the token that each position
    predicts, and the indices of positions whose token is in `mask_BT`. First tokens are never
    predicted.
    """
    is_wanted_BT = torch.ones_like(tokens_BT, dtype=torch.bool) if mask_BT is None else mask_BT
    is_wanted_BT = torch.cat((is_wanted_BT[:, 1:], torch.zeros_like(is_wanted_BT[:, :1])), 1)
    targets_N = local_rows(tokens_BT.roll(-1, 1), 1).T.reshape(-1)
    return targets_N, local_rows(is_wanted_BT, 1).T.reshape(-1).nonzero()[:, 0]


def score_rows(
    hidden_TBD: Tensor,
    head_VD: Tensor,
    tokens_BT: Tensor,
    mask_BT: Tensor | None,
    with_entropy: bool,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of whole rows, [B, T] each, from this rank's hidden states.
    Zeros at first tokens and where `mask_BT` is False; such positions skip the output matrix.
    """
    hidden_ND = hidden_TBD.reshape(-1, hidden_TBD.shape[-1])
    targets_N, chosen_C = local_targets(tokens_BT, mask_BT)
    scores = score_tokens(
        hidden_ND.index_select(0, chosen_C),
        head_VD,
        targets_N.index_select(0, chosen_C),
        with_entropy,
    )
    zeros_N = hidden_ND.new_zeros(targets_N.shape)
    logprobs_BT, entropy_BT = (
        _of_whole_rows(zeros_N.index_put((chosen_C,), scores_C).view(hidden_TBD.shape[:2]))
        for scores_C in scores
    )
    return logprobs_BT, entropy_BT


def _of_whole_rows(scores_TB: Tensor) -> Tensor:
    """Scores [B, T] at the predicted token, from this rank's scores at the predicting position."""
    whole_TB = gather_scores(scores_TB)
    return torch.cat((torch.zeros_like(whole_TB[:1]), whole_TB[:-1])).T


def _entropy_of_cut(logits_NV: Tensor) -> Tensor:
    """Entropies in nats over a vocabulary that is sharded over tensor-parallel ranks."""
    group = parallel_state.get_tensor_model_parallel_group()
    highest_N = logits_NV.amax(-1)
    dist.all_reduce(highest_N, dist.ReduceOp.MAX, group=group)
    shifted_NV = logits_NV - highest_N[:, None]
    weights_NV = shifted_NV.exp()
    sums_2N = torch.stack((weights_NV.sum(-1), (weights_NV * shifted_NV).sum(-1)))
    dist.all_reduce(sums_2N, group=group)
    return sums_2N[0].log() - sums_2N[1] / sums_2N[0]
