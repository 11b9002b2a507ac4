"""Draft layers for multi-token prediction, beside the trunk.

A draft layer has no attention and no cache, so a draft costs a few small products. Depth 0 reads
the trunk's hidden state after the final norm and the embedding of token t+1, and predicts token
t+2. Depth d reads the state of depth d-1 and the embedding of token t+1+d, and predicts token
t+2+d.

Shapes: N positions, D model width.
"""

import torch
from torch import Tensor
from torch.nn import functional

from ostinato.models.network.norm import RootMeanSquareNorm
from ostinato.models.spec import ModelSpec


class DraftLayer(torch.nn.Module):
    """One depth: a projection of state and embedding, then one SwiGLU with a residual."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        hidden, inner, epsilon = spec.hidden_size, spec.mtp_hidden_size, spec.norm_epsilon
        self.hidden_norm = RootMeanSquareNorm(hidden, eps=epsilon)
        self.embed_norm = RootMeanSquareNorm(hidden, eps=epsilon)
        self.in_proj = torch.nn.Linear(2 * hidden, hidden, bias=False)
        self.mlp_norm = RootMeanSquareNorm(hidden, eps=epsilon)
        self.gate_up_proj = torch.nn.Linear(hidden, 2 * inner, bias=False)
        self.down_proj = torch.nn.Linear(inner, hidden, bias=False)
        self.norm = RootMeanSquareNorm(hidden, eps=epsilon)

    def forward(self, hidden_ND: Tensor, embedding_ND: Tensor) -> tuple[Tensor, Tensor]:
        """State for the next depth, and the state that the shared embedding turns into logits."""
        joined = torch.cat((self.hidden_norm(hidden_ND), self.embed_norm(embedding_ND)), dim=-1)
        state_ND = self.in_proj(joined).to(hidden_ND.dtype)
        gate_NM, up_NM = self.gate_up_proj(self.mlp_norm(state_ND)).chunk(2, dim=-1)
        state_ND = state_ND + self.down_proj(functional.silu(gate_NM) * up_NM)
        return state_ND, self.norm(state_ND)
