"""RMSNorm, plugged in where Megatron builds a layer norm."""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional

from ostinato.kernels.rms_norm.op import rms_norm


class RootMeanSquareNorm(torch.nn.Module):
    """RMSNorm with one weight per channel, initially ones."""

    def __init__(
        self, hidden_size: int, eps: float, config: TransformerConfig | None = None
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))
        if config is not None:  # makes Megatron sum the gradients of the sequence's parts
            self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalises the last dimension."""
        hidden = hidden.to(torch.promote_types(hidden.dtype, self.weight.dtype))
        if hidden.is_cuda:  # one kernel; ours is for CPUs
            return functional.rms_norm(hidden, self.weight.shape, self.weight, self.eps)
        return rms_norm(hidden, self.weight, self.eps)
