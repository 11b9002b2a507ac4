"""Speculative decoding with the draft (multi-token prediction) layers, and the gate that stops it
when it does not pay.

Owns `Speculator` (drafting) and `SpeculationGate` (how many tokens to draft, from measured gain).
Enters: the trunk's last hidden state of each slot. Leaves: draft tokens behind each context.
Verification is the engine's: one pass over the drafts samples every position exactly as plain
decoding would, with the noise of (seed, position), and keeps drafts that equal the sample. So
speculation changes no token of any request, greedy or not: it is rejection sampling with a
point-mass proposal. The draft sees the same noise, which makes it pick the same token more often
than an independent draw.

Shapes: S slots, B drafting slots, m draft tokens plus one, V vocabulary, D model width.
"""

from collections import deque

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from models.decode.forward import Trunk
from models.decode.slots import SlotTable
from models.decode.weights import DecodeWeights

_WINDOW_STEPS = 16  # measurements a depth and batch size that the gate looks back on
_PROBE_ROUNDS = 6  # times each depth is tried in a probe
_FIRST_PROBE_INTERVAL_STEPS = 128
_LAST_PROBE_INTERVAL_STEPS = (
    4096  # a depth that keeps losing is tried ever less often: under 0.2 % of steps
)
_MIN_GAIN_RATIO = 1.03  # drafting must beat plain decoding by more than noise


class Speculator:
    """Draft tokens for many slots at once."""

    def __init__(
        self, trunk: Trunk, slots: int, hidden_size: int, depth: int, max_batch: int
    ) -> None:
        self.gate = SpeculationGate(depth, max_batch)
        self._trunk = trunk
        self._hidden_SD = torch.zeros(slots, hidden_size)

    def remember(self, slots_R: np.ndarray, hidden_RD: Tensor) -> None:
        """Keeps the hidden state of the last fed position of each slot."""
        self._hidden_SD.index_copy_(0, torch.from_numpy(slots_R), hidden_RD)

    def draft(
        self, weights: DecodeWeights, table: SlotTable, slots_B: np.ndarray, noise_BmV: np.ndarray
    ) -> None:
        """Writes m - 1 draft tokens behind each context; verified ones become part of it."""
        hidden_BD = self._hidden_SD.index_select(0, torch.from_numpy(slots_B))
        at_B = table.context_S[slots_B]
        tokens_B = table.tokens_SC[slots_B, at_B - 1]
        temperature_B = table.temperature_S[slots_B]
        is_greedy_B = temperature_B == 0
        divisor_B1 = torch.from_numpy(np.where(is_greedy_B, np.float32(1), temperature_B))[:, None]
        for depth in range(noise_BmV.shape[1] - 1):
            logits_BV, hidden_BD = draft_logits(
                self._trunk, weights, depth, hidden_BD, torch.from_numpy(tokens_B)
            )
            weights_BV = torch.softmax(logits_BV / divisor_B1, dim=-1).numpy()
            raced_BV = weights_BV / noise_BmV[:, depth]
            raced_BV[is_greedy_B] = weights_BV[is_greedy_B]
            tokens_B = raced_BV.argmax(axis=-1)
            table.tokens_SC[slots_B, at_B + depth] = tokens_B


def draft_logits(
    trunk: Trunk, weights: DecodeWeights, depth: int, hidden_BD: Tensor, tokens_B: Tensor
) -> tuple[Tensor, Tensor]:
    """One draft layer: logits [B, V] of the token after `tokens_B`, and the hidden state for the
    next depth.
    """
    layer = weights.drafts[depth]
    embedded_BD = weights.embedding_VD.index_select(0, tokens_B)
    mixed_BD = F.linear(trunk.normalize(hidden_BD), layer.hidden_in_DD)
    mixed_BD = torch.addmm(mixed_BD, trunk.normalize(embedded_BD), layer.embed_in_DD.t())
    gate, up = F.linear(trunk.normalize(mixed_BD), layer.gate_up_MD).chunk(2, dim=-1)
    mixed_BD = torch.addmm(mixed_BD, F.silu(gate).mul_(up), layer.down_MD)
    normal_BD = trunk.normalize(mixed_BD).mul_(layer.norm_D)
    return torch.mm(normal_BD, weights.embedding_VD.t()), mixed_BD


class SpeculationGate:
    """Picks the draft depth with the most measured tokens a second at the batch size."""

    def __init__(self, max_depth: int, max_batch: int) -> None:
        self.max_depth = max_depth
        self.max_batch = max_batch
        self.reset()

    def reset(self) -> None:
        """Forgets every measurement."""
        self._courses: dict[int, _Course] = {}
        self.verified_at_depth = np.zeros(self.max_depth, dtype=np.int64)
        self.accepted_at_depth = np.zeros(self.max_depth, dtype=np.int64)

    def choose(self, batch: int) -> int:
        """Draft tokens of the next step."""
        if batch > self.max_batch:
            return 0
        return self._course(batch).next_depth()

    def record(self, batch: int, depth: int, seconds: float, tokens: int) -> None:
        """Adds one decode-only step."""
        if batch <= self.max_batch:
            self._course(batch).record(depth, seconds / batch, tokens / batch)

    def count_accepted(self, accepted_B: np.ndarray, depth: int) -> None:
        """Counts, for each draft place, how often it was looked at (all before it accepted) and how
        often it held.
        """
        for place in range(depth):
            self.verified_at_depth[place] += int((accepted_B >= place).sum())
            self.accepted_at_depth[place] += int((accepted_B > place).sum())

    def preferred_depth(self, batch: int) -> int:
        """The depth that measured best so far at this batch size; 0 is plain decoding."""
        return self._course(batch).best if batch <= self.max_batch else 0

    def acceptance(self) -> list[float]:
        """Share accepted a draft place, given that the places before it were."""
        return [
            float(accepted / verified) if verified else 0.0
            for accepted, verified in zip(
                self.accepted_at_depth, self.verified_at_depth, strict=True
            )
        ]

    def _course(self, batch: int) -> "_Course":
        bucket = (batch - 1).bit_length()
        if bucket not in self._courses:
            self._courses[bucket] = _Course(self.max_depth)
        return self._courses[bucket]


class _Course:
    """Measurements and probing schedule of one batch-size bucket."""

    def __init__(self, max_depth: int) -> None:
        self.best = 0
        self._depths = max_depth + 1
        self._seconds: list[deque[float]] = [
            deque(maxlen=_WINDOW_STEPS) for _ in range(self._depths)
        ]
        self._tokens: list[deque[float]] = [
            deque(maxlen=4 * _WINDOW_STEPS) for _ in range(self._depths)
        ]
        self._probe_steps_left = _PROBE_ROUNDS * self._depths
        self._steps_until_probe = 0
        self._interval_steps = _FIRST_PROBE_INTERVAL_STEPS

    def next_depth(self) -> int:
        """Every depth in turn while probing, so that a slow moment of the machine hits all alike;
        else the best.
        """
        return self._probe_steps_left % self._depths if self._probe_steps_left else self.best

    def record(self, depth: int, seconds: float, tokens: float) -> None:
        self._seconds[depth].append(seconds)
        self._tokens[depth].append(tokens)
        if self._probe_steps_left:
            self._probe_steps_left -= 1
            if not self._probe_steps_left:
                self._decide()
            return
        self._steps_until_probe -= 1
        if not self._steps_until_probe:
            self._probe_steps_left = _PROBE_ROUNDS * self._depths

    def _decide(self) -> None:
        rates = [
            float(np.mean(tokens) / np.median(seconds)) if seconds else 0.0
            for tokens, seconds in zip(self._tokens, self._seconds, strict=True)
        ]
        winner = int(np.argmax(rates))
        winner = winner if rates[winner] > _MIN_GAIN_RATIO * rates[0] else 0
        is_settled = winner == self.best
        self._interval_steps = (
            min(2 * self._interval_steps, _LAST_PROBE_INTERVAL_STEPS)
            if is_settled
            else _FIRST_PROBE_INTERVAL_STEPS
        )
        self.best = winner
        self._steps_until_probe = self._interval_steps
