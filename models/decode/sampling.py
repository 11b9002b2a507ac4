"""Sampling of rows that top-k or top-p limits. Samples depend on the request's seed and the
position, never on the rest of the batch. Other rows are drawn by compiled/sampling.py.

A token is drawn by an exponential race: argmax of p / E where E is exponential noise hashed from
(seed, position, token). It is an exact draw from p, and two distributions that see the same noise
mostly pick the same token, which speculation uses.

Shapes: R rows, V vocabulary.
"""

import numpy as np
import torch
from torch import Tensor

# Constants of the noise's hash, which the compiled sampler shares.
GOLDEN_64 = np.uint64(0x9E3779B97F4A7C15)
MIX_64_A = np.uint64(0xBF58476D1CE4E5B9)
MIX_64_B = np.uint64(0x94D049BB133111EB)
GOLDEN_32 = np.uint32(0x9E3779B9)
MIX_32_A = np.uint32(0x85EBCA6B)
MIX_32_B = np.uint32(0xC2B2AE35)
UNIT_23 = np.float32(2.0**-23)


def exponential_noise(
    vocab_size: int, seed_keys_R: np.ndarray, positions_R: np.ndarray
) -> np.ndarray:
    """Float32 noise [R, V] with mean 1, the same for equal (seed key, position) in any batch."""
    keys_R = _mix_64(seed_keys_R + positions_R.astype(np.uint64) * GOLDEN_64)
    low_R1 = keys_R.astype(np.uint32)[:, None]
    high_R1 = (keys_R >> np.uint64(32)).astype(np.uint32)[:, None]
    bits_RV = np.arange(vocab_size, dtype=np.uint32) * GOLDEN_32 + low_R1
    bits_RV ^= bits_RV >> np.uint32(16)
    bits_RV *= MIX_32_A
    bits_RV += high_R1
    bits_RV ^= bits_RV >> np.uint32(13)
    bits_RV *= MIX_32_B
    bits_RV >>= np.uint32(9)  # 23 bits and a half are exact in float32: the noise is never 0
    return -np.log((bits_RV.astype(np.float32) + np.float32(0.5)) * UNIT_23)


def sample_rows(
    logits_RV: Tensor,
    temperature_R: np.ndarray,
    top_p_R: np.ndarray,
    top_k_R: np.ndarray,
    noise_RV: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Draws one token per row. Returns (tokens int64, logprobs float32).

    The log-probability is that of the distribution sampled from: after temperature, and
    renormalised over the tokens top-k (0: all) and then top-p kept. A greedy row (temperature 0)
    reports the log-probability under the untempered model.
    """
    is_greedy_R = temperature_R == 0
    weights_RV = _distributions(logits_RV, temperature_R, top_p_R, top_k_R).numpy()
    raced_RV = weights_RV / noise_RV
    raced_RV[is_greedy_R] = weights_RV[is_greedy_R]
    tokens_R = raced_RV.argmax(axis=-1)
    return tokens_R, np.log(weights_RV[np.arange(len(tokens_R)), tokens_R])


def likeliest_tokens(
    logits_RV: Tensor,
    temperature_R: np.ndarray,
    top_p_R: np.ndarray,
    top_k_R: np.ndarray,
    count: int,
) -> list[tuple[tuple[int, float], ...]]:
    """The `count` likeliest tokens of each row with their log-probabilities under the distribution
    that `sample_rows` draws from, likeliest first. Tokens that cannot be drawn are left out.
    """
    probabilities_RV = _distributions(logits_RV, temperature_R, top_p_R, top_k_R)
    best = probabilities_RV.topk(min(count, probabilities_RV.shape[-1]), dim=-1)
    return [
        tuple((token, float(np.log(share))) for token, share in zip(ids, row, strict=True) if share)
        for ids, row in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def _distributions(
    logits_RV: Tensor, temperature_R: np.ndarray, top_p_R: np.ndarray, top_k_R: np.ndarray
) -> Tensor:
    """Probabilities to draw tokens with. Those of a greedy row are the untempered model's."""
    divisor_R = np.where(temperature_R == 0, np.float32(1), temperature_R)
    probabilities_RV = torch.softmax(logits_RV / torch.from_numpy(divisor_R)[:, None], dim=-1)
    if top_k_R.any():
        rows = torch.from_numpy(np.flatnonzero(top_k_R))  # other rows stay bit for bit
        limited = keep_top_k(probabilities_RV[rows], torch.from_numpy(top_k_R)[rows])
        probabilities_RV[rows] = limited
    if (top_p_R < 1).any():
        probabilities_RV = keep_top_p(probabilities_RV, torch.from_numpy(top_p_R))
    return probabilities_RV


def keep_top_k(probabilities_RV: Tensor, top_k_R: Tensor) -> Tensor:
    """Keeps the k likeliest tokens of each row, renormalised. Lower ids win ties."""
    ordered_RV, order_RV = probabilities_RV.sort(dim=-1, descending=True, stable=True)
    is_kept_RV = torch.arange(probabilities_RV.shape[-1]) < top_k_R[:, None]
    ordered_RV = torch.where(is_kept_RV, ordered_RV, 0.0)
    kept_RV = torch.zeros_like(probabilities_RV).scatter_(1, order_RV, ordered_RV)
    return kept_RV / kept_RV.sum(dim=-1, keepdim=True)


def keep_top_p(probabilities_RV: Tensor, top_p_R: Tensor) -> Tensor:
    """Keeps the likeliest tokens whose mass reaches top_p, renormalised. 1 keeps all."""
    ordered_RV, order_RV = probabilities_RV.sort(dim=-1, descending=True)
    mass_before_RV = ordered_RV.cumsum(dim=-1) - ordered_RV
    limit_R1 = torch.where(top_p_R < 1, top_p_R, torch.inf)[:, None]
    ordered_RV = torch.where(mass_before_RV < limit_R1, ordered_RV, 0.0)
    kept_RV = torch.zeros_like(probabilities_RV).scatter_(1, order_RV, ordered_RV)
    return kept_RV / kept_RV.sum(dim=-1, keepdim=True)


def seed_key(seed: int) -> np.uint64:
    """Spreads a request's seed over 64 bits, so that noise of near seeds is unrelated."""
    return _mix_64(np.array([seed % 2**64], dtype=np.uint64) + GOLDEN_64)[0]


def _mix_64(values: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64."""
    values = (values ^ (values >> np.uint64(30))) * MIX_64_A
    values = (values ^ (values >> np.uint64(27))) * MIX_64_B
    return values ^ (values >> np.uint64(31))
