"""The plain formula of a mixture-of-experts layer's experts, to check `op.py` against.

Shapes: N tokens, K experts per token, E experts, D model width, F inner width of an expert.
"""

import torch
from torch import Tensor
from torch.nn import functional


def expert_mlp_reference(
    tokens_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor, gate_up_EGD: Tensor, down_EDF: Tensor
) -> Tensor:
    """Sums, over each token's experts, weight times SwiGLU of that expert."""
    output_ND = torch.zeros_like(tokens_ND)
    for expert in range(gate_up_EGD.shape[0]):
        gate_NF, up_NF = (tokens_ND @ gate_up_EGD[expert].T).chunk(2, dim=-1)
        result_ND = (functional.silu(gate_NF) * up_NF) @ down_EDF[expert].T
        weight_N = (weights_NK * (experts_NK == expert)).sum(-1)
        output_ND = output_ND + weight_N[:, None] * result_ND
    return output_ND
