"""RoPE frequencies."""

import math

import torch
from torch import Tensor

from ostinato.models.device import CPU
from ostinato.models.spec import RopeBands, Yarn


def stretch_frequencies(frequencies: Tensor, bands: RopeBands) -> Tensor:
    """RoPE frequencies after the scaling of Llama 3 (Hugging Face's `rope_type` llama3)."""
    turns = bands.original_tokens * frequencies / (2 * torch.pi)
    width = bands.high_frequency_factor - bands.low_frequency_factor
    kept = ((turns - bands.low_frequency_factor) / width).clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / bands.factor


def plain_frequencies(width: int, base: float) -> Tensor:
    """RoPE frequencies of `width` columns, computed on the CPU so that they are equal on every device."""
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device=CPU) / width
    return 1.0 / base**exponents


def yarn_frequencies(width: int, base: float, yarn: Yarn) -> Tensor:
    """RoPE frequencies of `width` columns after YaRN (arXiv 2309.00071, section 3.2)."""
    frequencies = plain_frequencies(width, base)

    def column(turns: float) -> float:
        """Index of the column pair that makes `turns` turns within the original context."""
        return width * math.log(yarn.original_tokens / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(column(yarn.fast_turns)), 0)
    high = min(math.ceil(column(yarn.slow_turns)), width - 1)
    ramp = (torch.arange(width // 2, device=CPU) - low) / (high - low if high != low else 1e-3)
    stretched = ramp.clamp(0, 1)
    return stretched * frequencies / yarn.factor + (1 - stretched) * frequencies


def yarn_scales(yarn: Yarn) -> tuple[float, float]:
    """Factors of the rotated columns and of the attention scores."""

    def grow(mscale: float) -> float:
        return 0.1 * mscale * math.log(yarn.factor) + 1.0

    if not yarn.mscale_all_dim:
        return grow(1.0), 1.0
    rotated = grow(yarn.mscale) / grow(yarn.mscale_all_dim) if yarn.mscale else grow(1.0)
    return rotated, grow(yarn.mscale_all_dim) ** 2
