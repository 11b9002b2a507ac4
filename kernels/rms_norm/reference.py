"""The plain formula of root-mean-square normalisation, to check `op.py` against."""

import torch
from torch import Tensor


def rms_norm_reference(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Scales the last dimension to mean square 1, then by `weight`."""
    return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + epsilon) * weight
