"""Sampling on the decoding device: the same noise, race and limits as sampling.py, in torch
operations of fixed shapes.

The noise's bits are those of `NoiseSource`, in integers that wrap; only its logarithm may differ in
the last place, as the softmax may. Nothing here reads a value back to the host.

Shapes: R rows, V vocabulary.
"""

import numpy as np
import torch
from torch import Tensor

from ostinato.models.decode.sampling import (
    GOLDEN_32,
    GOLDEN_64,
    MIX_32_A,
    MIX_32_B,
    MIX_64_A,
    MIX_64_B,
    UNIT_23,
)


def _signed(value: np.unsignedinteger) -> int:
    """The same bits as a signed number: torch multiplies no unsigned ones."""
    bits = 8 * value.itemsize
    return int(value) - (1 << bits if int(value) >> (bits - 1) else 0)


class DeviceNoise:
    """Exponential noise as a function of (seed, position, token)."""

    def __init__(self, vocab_size: int, device: str) -> None:
        keys_V = np.arange(vocab_size, dtype=np.uint32) * GOLDEN_32
        self._token_keys_V = torch.from_numpy(keys_V.view(np.int32)).to(device)

    def uniform_bits(self, seed_keys_R: Tensor, positions_R: Tensor) -> Tensor:
        """23 random bits [R, V] as int32."""
        keys_R = _mix_64(seed_keys_R + positions_R * _signed(GOLDEN_64))
        low_R1 = keys_R.to(torch.int32).unsqueeze(1)
        high_R1 = (keys_R >> 32).to(torch.int32).unsqueeze(1)
        bits_RV = self._token_keys_V + low_R1
        bits_RV = (bits_RV ^ _shift_32(bits_RV, 16)) * _signed(MIX_32_A) + high_R1
        bits_RV = (bits_RV ^ _shift_32(bits_RV, 13)) * _signed(MIX_32_B)
        return _shift_32(bits_RV, 9)

    def exponential(self, seed_keys_R: Tensor, positions_R: Tensor) -> Tensor:
        """Float32 noise [R, V] with mean 1; the same for equal (seed key, position) whatever the
        batch.
        """
        uniform_RV = self.uniform_bits(seed_keys_R, positions_R).float().add_(0.5)
        return uniform_RV.mul_(float(UNIT_23)).log_().neg_()


def draw_rows(
    logits_RV: Tensor, noise_RV: Tensor, temperature_R: Tensor, limits: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """(tokens, log-probs) as `sample_rows` draws them; `limits` are (top-k, top-p) or None when no
    row has any.
    """
    is_greedy_R = temperature_R == 0
    divisor_R = torch.where(is_greedy_R, 1.0, temperature_R)
    probabilities_RV = torch.softmax(logits_RV / divisor_R.unsqueeze(1), dim=-1)
    if limits is not None:
        probabilities_RV = _keep_likeliest(probabilities_RV, *limits)
    raced_RV = probabilities_RV / noise_RV
    raced_RV = torch.where(is_greedy_R.unsqueeze(1), probabilities_RV, raced_RV)
    tokens_R = raced_RV.argmax(dim=-1)
    return tokens_R, probabilities_RV.gather(1, tokens_R.unsqueeze(1)).squeeze(1).log()


def _keep_likeliest(probabilities_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor) -> Tensor:
    """Top-k, then top-p of what it left, each renormalised; rows without limits keep every bit."""
    has_k_R1, has_p_R1 = (top_k_R > 0).unsqueeze(1), (top_p_R < 1).unsqueeze(1)
    ordered_RV, order_RV = probabilities_RV.sort(dim=-1, descending=True, stable=True)
    vocabulary = ordered_RV.shape[-1]
    ranks_V = torch.arange(vocabulary, device=ordered_RV.device)
    most_R1 = torch.where(has_k_R1, top_k_R.unsqueeze(1), vocabulary)
    kept_RV = torch.where(ranks_V < most_R1, ordered_RV, 0.0)
    kept_RV = torch.where(has_k_R1, kept_RV / kept_RV.sum(dim=-1, keepdim=True), kept_RV)
    mass_before_RV = kept_RV.cumsum(dim=-1) - kept_RV
    mass_R1 = torch.where(has_p_R1, top_p_R.unsqueeze(1), torch.inf)
    likely_RV = torch.where(mass_before_RV < mass_R1, kept_RV, 0.0)
    likely_RV = torch.where(has_p_R1, likely_RV / likely_RV.sum(dim=-1, keepdim=True), likely_RV)
    return torch.zeros_like(likely_RV).scatter_(1, order_RV, likely_RV)


def _shift_32(values: Tensor, places: int) -> Tensor:
    """An unsigned shift to the right of signed 32-bit numbers."""
    return (values >> places) & ((1 << (32 - places)) - 1)


def _shift_64(values: Tensor, places: int) -> Tensor:
    return (values >> places) & ((1 << (64 - places)) - 1)


def _mix_64(values: Tensor) -> Tensor:
    """The finaliser of splitmix64."""
    values = (values ^ _shift_64(values, 30)) * _signed(MIX_64_A)
    values = (values ^ _shift_64(values, 27)) * _signed(MIX_64_B)
    return values ^ _shift_64(values, 31)
