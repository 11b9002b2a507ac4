"""Sampling that depends only on the request's seed and the position, never on what else is in the
batch.

A token is drawn by an exponential race: argmax of p / E where E is exponential noise hashed from
(seed, position, token). It is an exact draw from p, and two distributions that see the same noise
mostly pick the same token, which speculation uses.

Shapes: R rows, V vocabulary, W rows ahead.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# Of the noise; the compiled sampler (native_sampling.py) draws the same.
GOLDEN_64 = np.uint64(0x9E3779B97F4A7C15)
MIX_64_A = np.uint64(0xBF58476D1CE4E5B9)
MIX_64_B = np.uint64(0x94D049BB133111EB)
GOLDEN_32 = np.uint32(0x9E3779B9)
MIX_32_A = np.uint32(0x85EBCA6B)
MIX_32_B = np.uint32(0xC2B2AE35)
UNIT_23 = np.float32(2.0**-23)

_MOST_ROWS_AHEAD = 16
_NUMBERS_AHEAD = 65_536


@dataclass(frozen=True, slots=True)
class SamplingRules:
    """Sampling parameters per row. Arrays of R rows."""

    temperature_R: np.ndarray  # float32; 0 means greedy
    top_p_R: np.ndarray  # float32 in (0, 1]
    top_k_R: np.ndarray | None = None  # int64, 0 keeps all; None: all rows keep all

    @property
    def is_limited_R(self) -> np.ndarray:
        """Whether a row may not sample every token."""
        is_limited_R = self.top_p_R < 1
        return is_limited_R if self.top_k_R is None else is_limited_R | (self.top_k_R > 0)

    def of(self, rows: np.ndarray) -> "SamplingRules":
        """The rules of some rows."""
        top_k_R = None if self.top_k_R is None else self.top_k_R[rows]
        return SamplingRules(self.temperature_R[rows], self.top_p_R[rows], top_k_R)


class NoiseSource:
    """Exponential noise as a function of (seed, position, token)."""

    def __init__(self, vocab_size: int) -> None:
        self._token_keys_V = np.arange(vocab_size, dtype=np.uint32) * GOLDEN_32
        # One request alone asks for neighbouring positions step after step. A call costs 23 us and
        # a row of 1,280 tokens 2 us, so some are made ahead; of long rows nothing would be saved.
        self._rows_ahead = min(_MOST_ROWS_AHEAD, _NUMBERS_AHEAD // vocab_size)
        self._seed_key_ahead, self._start_ahead = -1, 0
        self._ahead_WV = np.zeros((0, vocab_size), dtype=np.float32)

    def exponential(self, seed_keys_R: np.ndarray, positions_R: np.ndarray) -> np.ndarray:
        """Float32 noise [R, V] with mean 1, to be read only. The same for equal (seed key,
        position) whatever the batch.
        """
        rows = len(positions_R)
        if 0 < rows < self._rows_ahead:
            seed_keys, positions = seed_keys_R.tolist(), positions_R.tolist()
            start = positions[0]
            if seed_keys.count(seed_keys[0]) == rows and positions == [*range(start, start + rows)]:
                return self._of_one(seed_keys_R, seed_keys[0], start)
        return self._make(seed_keys_R, positions_R)

    def _of_one(self, seed_keys_R: np.ndarray, seed_key: int, start: int) -> np.ndarray:
        """Noise of neighbouring positions of one request, ahead from its second call on."""
        rows, first = len(seed_keys_R), start - self._start_ahead
        if seed_key != self._seed_key_ahead:
            self._seed_key_ahead, self._ahead_WV = seed_key, self._ahead_WV[:0]
            return self._make(seed_keys_R, np.arange(start, start + rows))
        if first < 0 or first + rows > len(self._ahead_WV):
            seed_keys_W = np.repeat(seed_keys_R[:1], self._rows_ahead)
            positions_W = np.arange(start, start + self._rows_ahead)
            self._ahead_WV = self._make(seed_keys_W, positions_W)
            self._start_ahead, first = start, 0
        return self._ahead_WV[first : first + rows]

    def _make(self, seed_keys_R: np.ndarray, positions_R: np.ndarray) -> np.ndarray:
        keys_R = _mix_64(seed_keys_R + positions_R.astype(np.uint64) * GOLDEN_64)
        low_R1 = keys_R.astype(np.uint32)[:, None]
        high_R1 = (keys_R >> np.uint64(32)).astype(np.uint32)[:, None]
        bits_RV = self._token_keys_V + low_R1
        bits_RV ^= bits_RV >> np.uint32(16)
        bits_RV *= MIX_32_A
        bits_RV += high_R1
        bits_RV ^= bits_RV >> np.uint32(13)
        bits_RV *= MIX_32_B
        bits_RV >>= np.uint32(9)  # 23 bits and a half are exact in float32: the noise is never 0
        uniform_RV = bits_RV.astype(np.float32)
        uniform_RV += np.float32(0.5)
        uniform_RV *= UNIT_23
        np.log(uniform_RV, out=uniform_RV)
        return np.negative(uniform_RV, out=uniform_RV)


def sample_rows(
    logits_RV: Tensor, rules: SamplingRules, noise_RV: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Draws one token a row. Returns (tokens int64, logprobs float32).

    The log-probability is that of the distribution sampled from: after temperature, and
    renormalised over the tokens top-k and then top-p kept. A greedy row (temperature 0) reports the
    log-probability under the untempered model.
    """
    # Looking through lists costs less than numpy's reductions: 1 us against 2 to 3 for few rows.
    temperature_R, temperatures = rules.temperature_R, rules.temperature_R.tolist()
    if temperatures.count(1) < len(temperatures):
        divisor_R = np.where(temperature_R == 0, np.float32(1), temperature_R)
        logits_RV = logits_RV / torch.from_numpy(divisor_R)[:, None]
    probabilities_RV = torch.softmax(logits_RV, dim=-1)
    if rules.top_k_R is not None and any(rules.top_k_R.tolist()):
        rows = torch.from_numpy(np.flatnonzero(rules.top_k_R))  # others keep every bit
        limited = keep_top_k(probabilities_RV[rows], torch.from_numpy(rules.top_k_R)[rows])
        probabilities_RV[rows] = limited
    if min(rules.top_p_R.tolist(), default=1) < 1:
        probabilities_RV = keep_top_p(probabilities_RV, torch.from_numpy(rules.top_p_R))
    weights_RV = probabilities_RV.numpy()
    raced_RV = weights_RV / noise_RV
    if 0 in temperatures:
        is_greedy_R = temperature_R == 0
        raced_RV[is_greedy_R] = weights_RV[is_greedy_R]
    tokens_R = raced_RV.argmax(axis=-1)
    chosen_R = weights_RV[np.arange(len(tokens_R)), tokens_R]
    return tokens_R, np.log(chosen_R)


def keep_top_k(probabilities_RV: Tensor, top_k_R: Tensor) -> Tensor:
    """Keeps the k likeliest tokens of each row, renormalised. Of equal ones those with lower ids."""
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
    """Spreads a request's seed over 64 bits, so that near seeds share nothing."""
    return _mix_64(np.array([seed % 2**64], dtype=np.uint64) + GOLDEN_64)[0]


def _mix_64(values: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64."""
    values = (values ^ (values >> np.uint64(30))) * MIX_64_A
    values = (values ^ (values >> np.uint64(27))) * MIX_64_B
    return values ^ (values >> np.uint64(31))
