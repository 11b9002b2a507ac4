"""The plain formula of token log-probabilities and entropy, to check `op.py` against.

Shapes: N tokens, D model width, V vocabulary.
"""

import torch
from torch import Tensor


def token_logprobs_reference(
    hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the targets' log-probabilities and the entropy of each distribution, in nats."""
    logprobs_NV = torch.log_softmax(hidden_ND @ head_VD.T, dim=-1)
    entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
    return logprobs_NV.gather(-1, targets_N[:, None])[:, 0], entropy_N
