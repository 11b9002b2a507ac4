"""Speculative decoding: draft tokens from the draft (multi-token prediction) layers, from the
context itself, or from the context behind those of the draft layers.

Owns `Speculator`. Enters: the trunk's last hidden state of each slot. Leaves: draft tokens behind
each context. Verification is the engine's: one pass over the drafts samples every position exactly
as plain decoding would, with the noise of (seed, position), and keeps drafts that equal the sample.
So speculation changes no token of any request, greedy or not: it is rejection sampling with a
point-mass proposal. A draft layer sees the same noise, which makes it pick the same token more
often than an independent draw.

Shapes: S slots, B drafting slots, m draft tokens plus one, V vocabulary, D model width.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from models.decode.config import EngineConfig
from models.decode.forward import Trunk, add_product, linear
from models.decode.gate import SpeculationGate
from models.decode.lookup import find_continuations
from models.decode.sampling import NoiseSource
from models.decode.slots import SlotTable
from models.decode.weights import DecodeWeights

if TYPE_CHECKING:
    from models.decode.native_trunk import NativeTrunk

__all__ = ["Drafted", "SpeculationGate", "Speculator", "draft_logits"]


_PATIENCE_STEPS = 32
_LONGEST_PAUSE_STEPS = 256


@dataclass(frozen=True, slots=True)
class Drafted:
    """What one step verifies."""

    choice: int  # of the gate
    has_match: bool  # the context had something to copy
    width: int = 1  # rows a slot: its last token and the drafts
    layered: int = 0  # drafts that draft layers made; they come first
    noise_BmV: np.ndarray | None = None  # of all rows, where drafting needed it already


class Speculator:
    """Draft tokens for many slots at once."""

    def __init__(
        self,
        trunk: Trunk,
        native: "NativeTrunk | None",
        hidden_size: int,
        depth: int,
        config: EngineConfig,
        noise: NoiseSource,
    ) -> None:
        self.gate = SpeculationGate(depth, config.speculation_max_batch)
        self._trunk, self._native = trunk, native
        self._noise = noise
        self._lookup_tokens = config.lookup_tokens
        self._is_drafted_in_pass = config.is_static  # and nothing is copied behind such drafts
        self._hidden_SD = torch.zeros(config.slots, hidden_size)
        self._misses = 0  # searches in a row that found nothing to copy
        self._steps_to_skip = 0

    def remember(self, slots_R: np.ndarray, hidden_RD: Tensor) -> None:
        """Keeps the hidden state of the last fed position of each slot."""
        self._hidden_SD.index_copy_(0, torch.from_numpy(slots_R), hidden_RD)

    def propose(self, weights: DecodeWeights, table: SlotTable, slots_B: np.ndarray) -> Drafted:
        """Writes the gate's choice of draft tokens behind each context; verified ones become part
        of it.
        """
        batch, has_match = len(slots_B), False
        proposals_Bk = np.zeros((0, 0), dtype=np.int64)
        if self._lookup_tokens and self._is_worth_a_search(batch):
            proposals_Bk, found = find_continuations(table, slots_B, self._lookup_tokens)
            has_match = 2 * found >= batch
            self._misses = 0 if has_match else self._misses + 1
            if self._misses and self._misses % _PATIENCE_STEPS == 0:
                self._steps_to_skip = min(2 * self._misses, _LONGEST_PAUSE_STEPS)
        choice = self.gate.choose(batch, has_match=has_match)
        if choice == 0:
            return Drafted(choice, has_match)
        at_B = table.context_S[slots_B]
        if choice == self.gate.lookup_choice:
            places_Bk = at_B[:, None] + np.arange(self._lookup_tokens)
            table.tokens_SC[slots_B[:, None], places_Bk] = proposals_Bk
            return Drafted(choice, has_match, self._lookup_tokens + 1)
        if self._is_drafted_in_pass:
            return Drafted(choice, has_match, choice + 1, choice)
        noise_BmV = None
        if self._native is not None:
            self._draft_native(self._native, weights, table, slots_B, choice)
        else:
            noise_BmV = step_noise(self._noise, table, slots_B, choice + 1)
            self._draft_layers(weights, table, slots_B, noise_BmV)
        copied = self._copy_behind(table, slots_B, choice)
        if copied:
            noise_BmV = None  # of fewer rows than there are now
        return Drafted(choice, has_match, choice + 1 + copied, choice, noise_BmV)

    def _copy_behind(self, table: SlotTable, slots_B: np.ndarray, drafted: int) -> int:
        """Copies from the context what followed the last drafts there, where copies were measured to pay;
        returns the tokens added to each slot.
        """
        batch = len(slots_B)
        if self.gate.preferred_depth(batch, has_match=True) != self.gate.lookup_choice:
            return 0
        proposals_Bk, found = find_continuations(table, slots_B, self._lookup_tokens, drafted)
        if 2 * found < batch:
            return 0
        places_Bk = (table.context_S[slots_B] + drafted)[:, None] + np.arange(self._lookup_tokens)
        table.tokens_SC[slots_B[:, None], places_Bk] = proposals_Bk
        return self._lookup_tokens

    def _is_worth_a_search(self, batch: int) -> bool:
        """A text that repeats nothing is searched ever less often."""
        if self._steps_to_skip:
            self._steps_to_skip -= 1
            return False
        return self.gate.wants_match(batch)

    def _draft_layers(
        self, weights: DecodeWeights, table: SlotTable, slots_B: np.ndarray, noise_BmV: np.ndarray
    ) -> None:
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

    def _draft_native(
        self,
        native: "NativeTrunk",
        weights: DecodeWeights,
        table: SlotTable,
        slots_B: np.ndarray,
        depths: int,
    ) -> None:
        hidden_BD = self._hidden_SD.numpy()[slots_B]
        at_B = table.context_S[slots_B]
        tokens_B = table.tokens_SC[slots_B, at_B - 1]
        seed_keys_B, temperature_B = table.seed_keys_S[slots_B], table.temperature_S[slots_B]
        for depth in range(depths):
            native.draft(weights, depth, hidden_BD, tokens_B)
            tokens_B = native.sample(seed_keys_B, at_B + depth, temperature_B)[0]
            table.tokens_SC[slots_B, at_B + depth] = tokens_B


def step_noise(noise: NoiseSource, table: SlotTable, slots_B: np.ndarray, width: int) -> np.ndarray:
    """Noise [B, m, V] of the places behind each context."""
    positions_Bm = table.context_S[slots_B][:, None] + np.arange(width)
    seed_keys_R = np.repeat(table.seed_keys_S[slots_B], width)
    noise_RV = noise.exponential(seed_keys_R, positions_Bm.reshape(-1))
    return noise_RV.reshape(*positions_Bm.shape, -1)


def draft_logits(
    trunk: Trunk, weights: DecodeWeights, depth: int, hidden_BD: Tensor, tokens_B: Tensor
) -> tuple[Tensor, Tensor]:
    """One draft layer: logits [B, V] of the token after `tokens_B`, and the hidden state for the
    next depth.
    """
    layer = weights.drafts[depth]
    embedded_BD = weights.embedding_VD.index_select(0, tokens_B).float()
    mixed_BD = linear(trunk.normalize(hidden_BD), layer.hidden_in_DD)
    mixed_BD = add_product(mixed_BD, trunk.normalize(embedded_BD), layer.embed_in_DD.t())
    gate, up = linear(trunk.normalize(mixed_BD), layer.gate_up_MD).chunk(2, dim=-1)
    mixed_BD = add_product(mixed_BD, F.silu(gate).mul_(up), layer.down_MD)
    normal_BD = trunk.normalize(mixed_BD).mul_(layer.norm_D)
    return linear(normal_BD, weights.embedding_VD), mixed_BD
