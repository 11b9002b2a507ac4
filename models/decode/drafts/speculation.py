"""Speculative decoding: draft tokens from the draft (multi-token prediction) layers, from the
context itself, or from the context behind those of the draft layers.

Verification is the engine's: one pass over the drafts samples every position exactly as plain
decoding would, with the noise of (seed, position), and keeps drafts that equal the sample. So
speculation changes no token of any request, greedy or not: it is rejection sampling with a
point-mass proposal. A draft layer sees the same noise, which makes it pick the same token more
often than an independent draw.

Shapes: S slots, B drafting slots, F slots of the pass before, m draft tokens plus one, V vocabulary,
D model width.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.models.decode.config import EngineConfig
from ostinato.models.decode.drafts.lookup import Lookup
from ostinato.models.decode.drafts.policy import DraftPolicy
from ostinato.models.decode.forward import Trunk, add_product, linear
from ostinato.models.decode.sampling import NoiseSource
from ostinato.models.decode.slots import SlotTable
from ostinato.models.decode.weights import DecodeWeights

if TYPE_CHECKING:
    from ostinato.models.decode.compiled.trunk import NativeTrunk

_ANSWERS_PER_LEARNED = 8  # while the lookup finds nothing, so many answers pass for one learned

__all__ = ["Drafted", "Speculator", "draft_logits"]


@dataclass(frozen=True, slots=True)
class Drafted:
    """Drafts that one step verifies."""

    width: int = 1  # rows per slot: its last token and the drafts
    layered: int = 0  # drafts that draft layers made; they come first
    noise_BmV: np.ndarray | None = None  # of all rows, where drafting needed it already


_PLAIN = Drafted()


class Speculator:
    """Draft tokens for many slots at once."""

    def __init__(
        self,
        trunk: Trunk,
        native: "NativeTrunk | None",
        depth: int,
        config: EngineConfig,
        noise: NoiseSource,
    ) -> None:
        self.policy = DraftPolicy(
            depth,
            config.speculation_max_batch,
            config.lookup_tokens,
            always_drafts=config.always_drafts,
        )
        self._trunk, self._native = trunk, native
        self._noise = noise
        self._lookup = Lookup(config.lookup_entries) if config.lookup_tokens else None
        self._answers, self._was_found = 0, True
        self._fed: tuple[np.ndarray, Tensor, np.ndarray] | None = None

    def remember(self, slots_B: np.ndarray, hidden_RD: Tensor, gained_B: np.ndarray) -> None:
        """Takes the hidden states of a pass, the same number of rows per slot. Draft layers begin
        with that of a slot's last token gained. Read, if ever, before the next pass.
        """
        self._fed = (slots_B, hidden_RD, gained_B)

    def learn(self, tokens_T: np.ndarray, start: int) -> None:
        """Takes a finished answer: its tokens from `start` on may be guessed again. While nothing is
        found, one answer in some is enough to notice when that changes.
        """
        self._answers += 1
        is_due = self._was_found or self._answers % _ANSWERS_PER_LEARNED == 0
        if self._lookup is not None and is_due:
            self._lookup.learn(tokens_T, start)
            self._was_found = False

    def record(self, batch: int, drafted: Drafted, seconds: float, tokens: int) -> None:
        """Adds one decode-only step."""
        copies = drafted.width - 1 - drafted.layered
        self.policy.record(batch, drafted.layered, copies, seconds, tokens)

    def propose(
        self, weights: DecodeWeights, table: SlotTable, slots_B: np.ndarray
    ) -> Drafted | None:
        """Writes draft tokens behind each context as the policy chooses. Verified ones become part
        of it. None: a plain step that nobody need measure.
        """
        batch = len(slots_B)
        if not self.policy.should_measure(batch):
            return None
        if not self.policy.should_draft(batch):
            return _PLAIN
        copied, rate = self._copy(table, slots_B, layers=0)
        layers = self.policy.choose_layers(batch, rate)
        self.policy.count_proposal(batch, has_drafts=copied > 0 or layers > 0)
        if not layers:
            return Drafted(1 + copied)
        noise_BmV = None
        if self._native is not None:
            self._draft_native(self._native, weights, table, slots_B, layers)
        else:
            noise_BmV = step_noise(self._noise, table, slots_B, layers + 1)
            self._draft_layers(weights, table, slots_B, noise_BmV)
        copied, _ = self._copy(table, slots_B, layers)
        if copied:
            noise_BmV = None  # of fewer rows than there are now
        return Drafted(1 + layers + copied, layers, noise_BmV)

    def _copy(self, table: SlotTable, slots_B: np.ndarray, layers: int) -> tuple[int, float]:
        """Writes what the lookup finds behind the drafts of `layers`; (drafts, tokens expected per
        cost of a plain step).
        """
        if self._lookup is None:
            return 0, 0.0
        costs_w = self.policy.costs(len(slots_B), layers).relative_w
        held = float(np.prod(self.policy.acceptance()[:layers]))
        copied, rate = self._lookup.propose(table, slots_B, costs_w, layers, held)
        self._was_found |= copied > 0
        return copied, rate

    def _last_hidden(self, slots_B: np.ndarray) -> np.ndarray:
        """Hidden states [B, D]: every slot that decodes was sampled in the pass before."""
        assert self._fed is not None, "slots decode after the pass that completed their prompt"
        fed_slots_F, hidden_RD, gained_F = self._fed
        order_F = fed_slots_F.argsort()
        index_B = order_F[np.searchsorted(fed_slots_F, slots_B, sorter=order_F)]
        width = len(hidden_RD) // len(fed_slots_F)
        return hidden_RD.numpy()[index_B * width + gained_F[index_B] - 1]

    def _draft_layers(
        self, weights: DecodeWeights, table: SlotTable, slots_B: np.ndarray, noise_BmV: np.ndarray
    ) -> None:
        hidden_BD = torch.from_numpy(self._last_hidden(slots_B))
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
        hidden_BD = self._last_hidden(slots_B)
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
    """Logits [B, V] after `tokens_B` by one draft layer, and the next depth's hidden state."""
    layer = weights.drafts[depth]
    embedded_BD = weights.embedding_VD.index_select(0, tokens_B).float()
    mixed_BD = linear(trunk.normalize(hidden_BD), layer.hidden_in_DD)
    mixed_BD = add_product(mixed_BD, trunk.normalize(embedded_BD), layer.embed_in_DD.t())
    gate, up = linear(trunk.normalize(mixed_BD), layer.gate_up_MD).chunk(2, dim=-1)
    mixed_BD = add_product(mixed_BD, F.silu(gate).mul_(up), layer.down_MD)
    normal_BD = trunk.normalize(mixed_BD).mul_(layer.norm_D)
    return linear(normal_BD, weights.embedding_VD), mixed_BD
