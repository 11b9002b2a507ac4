"""Frequencies by which positions rotate heads."""

import torch
from torch import Tensor

from ostinato.models.spec import RopeBands


def stretch_frequencies(frequencies: Tensor, bands: RopeBands) -> Tensor:
    """RoPE frequencies after the scaling of Llama 3."""
    turns = bands.original_tokens * frequencies / (2 * torch.pi)
    width = bands.high_frequency_factor - bands.low_frequency_factor
    kept = ((turns - bands.low_frequency_factor) / width).clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / bands.factor
