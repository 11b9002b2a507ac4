"""Speculative decoding: draft tokens from the draft (multi-token prediction) layers, from the
lookup, or from the lookup after those of the draft layers.

The engine verifies drafts: one pass over them samples every position exactly as plain decoding
would, with the noise of (seed, position), and keeps drafts that equal the sample. Speculation
therefore changes no token of any request, greedy or not: it is rejection sampling with a point-mass
proposal. A draft layer uses the same noise, so it picks the same token more often than an
independent draw would.

Shapes: S slots, B drafting slots, F slots of the pass before, D model width.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ostinato.models.decode.compiled.lookup import KINDS, ORDERS, learn_answer, propose_drafts
from ostinato.models.decode.config import EngineConfig
from ostinato.models.decode.drafts.policy import DraftPolicy
from ostinato.models.decode.slots import SlotTable
from ostinato.models.decode.weights import DecodeWeights

if TYPE_CHECKING:
    from ostinato.models.decode.compiled.native import NativeTrunk


class Lookup:
    """Draft tokens copied from text that followed the same tokens before: earlier in the context, or
    in earlier answers of this engine. Such drafts cost no pass of any layer, and often hold, since
    agents repeat lines of the files they read, their own names and the form of their calls.

    The memory is a back-off n-gram model (after SuffixDecoding, arXiv 2411.04975): for the last 2, 4,
    8 and 16 tokens before each position of an answer, the token that followed and how often it did,
    in hashed tables of fixed size with a vote in each entry (after the branch predictor TAGE).

    Shapes: B decoding slots, O orders (lengths of the tables), N entries of a table, K kinds of guess.
    """

    def __init__(self, entries: int) -> None:
        """`entries`: of each table; 0: drafts come from the context only."""
        if entries & (entries - 1):
            raise ValueError(f"lookup_entries={entries}, wanted 0 or a power of two")
        self._entries_ON4 = np.zeros((len(ORDERS), entries, 4), dtype=np.int32)
        self._held_K = np.full(KINDS, 1.0, dtype=np.float32)
        self._seen_K = np.full(KINDS, 2.0, dtype=np.float32)

    def learn(self, tokens_T: np.ndarray, start: int) -> None:
        """Learns from a finished answer, which begins at `start`: whether the guess at each
        position would have held, and which token followed.
        """
        learn_answer(tokens_T, start, self._entries_ON4, self._held_K, self._seen_K)

    def propose(
        self,
        table: SlotTable,
        slots_B: np.ndarray,
        costs_w: np.ndarray,
        drafted: int = 0,
        probability: float = 1.0,
    ) -> tuple[int, float]:
        """Writes drafts after each context and its `drafted` tokens, which hold with `probability`.
        Returns (drafts written per slot, expected tokens per slot and unit of cost). The number of
        drafts maximises that rate, where `costs_w[j]` is the cost of a step with j lookup drafts. A
        slot with fewer guesses repeats its last token.
        """
        count, rate = propose_drafts(
            table.tokens_SC,
            table.is_stop_SV,
            table.limit_S,
            slots_B,
            table.context_S,
            drafted,
            np.float32(probability),
            costs_w,
            self._entries_ON4,
            self._held_K,
            self._seen_K,
        )
        return int(count), float(rate)


_ANSWERS_PER_LEARNED = 8  # while the lookup finds nothing, it learns only one answer in this many


@dataclass(frozen=True, slots=True)
class Drafted:
    """Drafts that one step verifies."""

    width: int = 1  # rows per slot: its last token and the drafts
    layered: int = 0  # drafts that draft layers made; they come first


_PLAIN = Drafted()


class Speculator:
    """Draft tokens for many slots at once."""

    def __init__(self, native: "NativeTrunk", depth: int, config: EngineConfig) -> None:
        self.policy = DraftPolicy(
            depth,
            config.speculation_max_batch,
            config.lookup_tokens,
            always_drafts=config.always_drafts,
        )
        self._native = native
        self._lookup = Lookup(config.lookup_entries) if config.lookup_tokens else None
        self._answers, self._was_found = 0, True
        self._fed: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    def remember(self, slots_B: np.ndarray, hidden_RD: np.ndarray, gained_B: np.ndarray) -> None:
        """Keeps the hidden states of a pass, which has the same number of rows per slot. Draft
        layers begin with the state of a slot's last gained token. The arrays are views, read before
        the next pass.
        """
        self._fed = (slots_B, hidden_RD, gained_B)

    def learn(self, tokens_T: np.ndarray, start: int) -> None:
        """Adds a finished answer, which begins at `start`, to the lookup. While the lookup finds
        nothing, one answer in `_ANSWERS_PER_LEARNED` is enough to notice a change.
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
        """Writes as many draft tokens after each context as the policy chooses. None: a plain step
        that need not be measured.
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
        self._draft_layers(weights, table, slots_B, layers)
        copied, _ = self._copy(table, slots_B, layers)
        return Drafted(1 + layers + copied, layers)

    def _copy(self, table: SlotTable, slots_B: np.ndarray, layers: int) -> tuple[int, float]:
        """Writes the lookup's drafts after those of `layers` layers. Returns (drafts, tokens
        expected per unit of a step's cost).
        """
        if self._lookup is None:
            return 0, 0.0
        costs_w = self.policy.costs(len(slots_B), layers).relative_w
        held = float(np.prod(self.policy.acceptance()[:layers]))
        copied, rate = self._lookup.propose(table, slots_B, costs_w, layers, held)
        self._was_found |= copied > 0
        return copied, rate

    def _last_hidden(self, slots_B: np.ndarray) -> np.ndarray:
        """Hidden states [B, D] of the last pass, in which every decoding slot was sampled."""
        assert self._fed is not None, "slots decode after the pass that completed their prompt"
        fed_slots_F, hidden_RD, gained_F = self._fed
        order_F = fed_slots_F.argsort()
        index_B = order_F[np.searchsorted(fed_slots_F, slots_B, sorter=order_F)]
        width = len(hidden_RD) // len(fed_slots_F)
        return hidden_RD[index_B * width + gained_F[index_B] - 1]

    def _draft_layers(
        self, weights: DecodeWeights, table: SlotTable, slots_B: np.ndarray, depths: int
    ) -> None:
        hidden_BD = self._last_hidden(slots_B)
        at_B = table.context_S[slots_B]
        tokens_B = table.tokens_SC[slots_B, at_B - 1]
        seed_keys_B, temperature_B = table.seed_keys_S[slots_B], table.temperature_S[slots_B]
        for depth in range(depths):
            self._native.draft(weights, depth, hidden_BD, tokens_B)
            tokens_B = self._native.sample(seed_keys_B, at_B + depth, temperature_B)[0]
            table.tokens_SC[slots_B, at_B + depth] = tokens_B
