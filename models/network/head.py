"""Log-probabilities from the states before the output matrix.

Shapes: N positions, V vocabulary, D model width.
"""

import torch
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from torch import Tensor

from ostinato.kernels.logprobs.op import token_logprobs
from ostinato.models.network.parallel.shards import find_cut


def score_tokens(
    hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies, with the vocabulary on one rank or cut over several."""
    if find_cut(head_VD) is None:
        return token_logprobs(hidden_ND, head_VD, targets_N, with_entropy=with_entropy)
    if with_entropy:
        raise ValueError("with_entropy is True under tensor parallelism, wanted False")
    if len(targets_N) == 0:  # still a part of the graph: other ranks' experts wait for it
        return hidden_ND.sum(-1), hidden_ND.new_zeros(0)
    losses_N = vocab_parallel_cross_entropy(hidden_ND @ head_VD.T, targets_N)
    return -losses_N, torch.zeros_like(losses_N)
