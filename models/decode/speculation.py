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
from models.decode.sampling import NoiseSource
from models.decode.slots import SlotTable
from models.decode.weights import DecodeWeights

if TYPE_CHECKING:
    from models.decode.native_trunk import NativeTrunk

__all__ = ["Drafted", "SpeculationGate", "Speculator", "draft_logits"]


@dataclass(frozen=True, slots=True)
class Drafted:
    """What one step verifies."""

    choice: int  # of the gate
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
        has_copies = config.lookup_tokens > 0
        self.gate = SpeculationGate(depth, config.speculation_max_batch, has_copies=has_copies)
        self._trunk, self._native = trunk, native
        self._noise = noise
        self._lookup_tokens = config.lookup_tokens
        if has_copies:
            from models.decode.lookup import find_continuations  # noqa: PLC0415 - loads numba

            self._find_continuations = find_continuations
        self._is_drafted_in_pass = config.is_static  # and nothing is copied behind such drafts
        self._hidden_SD = np.zeros((config.slots, hidden_size), dtype=np.float32)

    def remember(self, slots_R: np.ndarray, hidden_RD: Tensor) -> None:
        """Keeps the hidden state of the last fed position of each slot."""
        if self.gate.max_depth:
            self._hidden_SD[slots_R] = hidden_RD.numpy()

    def propose(self, weights: DecodeWeights, table: SlotTable, slots_B: np.ndarray) -> Drafted:
        """Writes draft tokens behind each context as the gate chooses; verified ones become part of
        it.
        """
        choice = self.gate.choose(len(slots_B))
        is_copying, layers = self.gate.copies(choice), self.gate.layers_of(choice)
        copied = self._copy(table, slots_B, 0) if is_copying else 0
        if copied or not layers:
            return Drafted(choice, 1 + copied)
        if self._is_drafted_in_pass:
            return Drafted(choice, 1 + layers, layers)
        noise_BmV = None
        if self._native is not None:
            self._draft_native(self._native, weights, table, slots_B, layers)
        else:
            noise_BmV = step_noise(self._noise, table, slots_B, layers + 1)
            self._draft_layers(weights, table, slots_B, noise_BmV)
        copied = self._copy(table, slots_B, layers) if is_copying else 0
        if copied:
            noise_BmV = None  # of fewer rows than there are now
        return Drafted(choice, 1 + layers + copied, layers, noise_BmV)

    def _copy(self, table: SlotTable, slots_B: np.ndarray, drafted: int) -> int:
        """Copies what followed the last tokens and the drafts behind them earlier in the context, if at
        least half of the slots have that; returns the tokens added to each slot.
        """
        count = self._lookup_tokens
        proposals_Bk, found = self._find_continuations(table, slots_B, count, drafted)
        if 2 * found < len(slots_B):
            return 0
        places_Bk = (table.context_S[slots_B] + drafted)[:, None] + np.arange(count)
        table.tokens_SC[slots_B[:, None], places_Bk] = proposals_Bk
        return count

    def _draft_layers(
        self, weights: DecodeWeights, table: SlotTable, slots_B: np.ndarray, noise_BmV: np.ndarray
    ) -> None:
        hidden_BD = torch.from_numpy(self._hidden_SD[slots_B])
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
        hidden_BD = self._hidden_SD[slots_B]
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
