"""Draft tokens copied from text that followed the same tokens before: earlier in the context, or in
earlier answers of this engine.

Such drafts cost no pass of any layer. They often hold, since agents repeat lines of the files they
read, their own names and the form of their calls. The engine verifies them like any other draft.

The memory is a back-off n-gram model (after SuffixDecoding, arXiv 2411.04975): for the last 2, 4, 8 and
16 tokens before each position of an answer, the token that followed and how often it did, in hashed
tables of fixed size with a vote in each entry (after the branch predictor TAGE).

Shapes: B decoding slots, O orders (lengths of the tables), N entries of a table, K kinds of guess.
"""

import numpy as np

from ostinato.models.decode.compiled.lookup import KINDS, ORDERS, learn_answer, propose_drafts
from ostinato.models.decode.slots import SlotTable


class Lookup:
    """Memory of one engine, with `entries` per table. 0: drafts come from the context only."""

    def __init__(self, entries: int) -> None:
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
