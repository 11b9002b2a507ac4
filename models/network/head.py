"""Log-probabilities from the states before the output matrix.

Shapes: N positions, V vocabulary, D model width.
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
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
    if len(targets_N) == 0:  # still a part of the graph: other ranks' experts wait for it
        return hidden_ND.sum(-1), hidden_ND.new_zeros(0)
    logits_NV = hidden_ND @ head_VD.T  # of this rank's stretch of the vocabulary
    entropy_N = (
        _entropy_of_cut(logits_NV.detach()) if with_entropy else logits_NV.new_zeros(len(targets_N))
    )
    return -vocab_parallel_cross_entropy(logits_NV, targets_N), entropy_N


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
