"""The slot table: state, token ids, log-probs and versions of each slot as arrays, its sessions in
least-recently-used order, and prefix matching. Per-token bookkeeping is one write over all slots.

Shapes: S slots, C positions, V vocabulary, B slots of a selection.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from ostinato.models.decode.compiled.slots import pack_stop_runs, take_samples
from ostinato.models.decode.protocol import GenerateRequest
from ostinato.models.decode.sampling import seed_key


class SlotState(IntEnum):
    """State of a slot."""

    FREE = 0
    IDLE = 1  # holds a session between two turns
    RUNNING = 2


@dataclass(frozen=True, slots=True)
class AcceptedSamples:
    """Outcome of one pass's samples."""

    accepted_B: np.ndarray  # drafts that held
    gained_B: np.ndarray  # tokens added
    ends_B: np.ndarray  # state of the request, as in compiled/slots.py
    gained: int  # tokens of all slots
    drafts_used: int  # drafts among them
    ended: int  # requests


class SlotTable:
    """Arrays over slots. `tokens_SC[s, :context_S[s]]` are known; the first `cached_S[s]` are fed."""

    def __init__(self, slots: int, positions: int, vocab_size: int) -> None:
        self.state_S = np.zeros(slots, dtype=np.int8)
        self.tokens_SC = np.zeros((slots, positions), dtype=np.int64)
        self.logprobs_SC = np.zeros((slots, positions), dtype=np.float32)
        self.versions_SC = np.zeros((slots, positions), dtype=np.int64)
        self.context_S = np.zeros(slots, dtype=np.int64)
        self.cached_S = np.zeros(slots, dtype=np.int64)
        self.limit_S = np.zeros(slots, dtype=np.int64)  # context length at which sampling ends
        self.routed_S = np.zeros(slots, dtype=np.int64)  # positions whose routes are final
        # positions whose routes were reported to this session
        self.reported_S = np.zeros(slots, dtype=np.int64)
        # of the weights that computed the cached keys
        self.oldest_version_S = np.zeros(slots, dtype=np.int64)
        self.seed_keys_S = np.zeros(slots, dtype=np.uint64)
        self.temperature_S = np.ones(slots, dtype=np.float32)
        self.top_p_S = np.ones(slots, dtype=np.float32)
        self.top_k_S = np.zeros(slots, dtype=np.int64)
        self.prompt_S = np.zeros(slots, dtype=np.int64)  # prompt tokens of the running request
        self.drafts_proposed_S = np.zeros(slots, dtype=np.int64)  # for the running request
        self.drafts_used_S = np.zeros(slots, dtype=np.int64)
        self._stop_runs_SX = np.zeros((slots, 1), dtype=np.int64)  # stop sequences, packed
        self.is_stop_SV = np.zeros((slots, vocab_size), dtype=bool)
        self._used_at_S = np.zeros(slots, dtype=np.int64)
        self._uses = 0
        self._session_of_slot: list[str | None] = [None] * slots
        self._slot_of_session: dict[str, int] = {}

    @property
    def decode_arrays(self) -> tuple[np.ndarray, ...]:
        """Arrays in the order of the arguments of a compiled decode step."""
        return (
            self.tokens_SC,
            self.cached_S,
            self.context_S,
            self.seed_keys_S,
            self.temperature_S,
            self.top_p_S,
            self.top_k_S,
        )

    @property
    def _arrays(self) -> tuple[np.ndarray, ...]:
        """Arrays in the order of the arguments of the compiled `take_samples`."""
        return (
            self.tokens_SC,
            self.logprobs_SC,
            self.versions_SC,
            self.context_S,
            self.cached_S,
            self.routed_S,
            self.limit_S,
            self.prompt_S,
            self.drafts_proposed_S,
            self.drafts_used_S,
            self.is_stop_SV,
            self._stop_runs_SX,
        )

    def _set_stop_runs(self, slot: int, words_X: np.ndarray) -> None:
        missing = len(words_X) - self._stop_runs_SX.shape[1]
        if missing > 0:
            self._stop_runs_SX = np.pad(self._stop_runs_SX, ((0, 0), (0, missing)))
        self._stop_runs_SX[slot, : len(words_X)] = words_X

    def running(self) -> np.ndarray:
        """Slots with a request, ascending."""
        return np.flatnonzero(self.state_S == SlotState.RUNNING)

    def session_slot(self, session_id: str) -> int | None:
        """The idle slot that holds a session."""
        slot = self._slot_of_session.get(session_id)
        return slot if slot is not None and self.state_S[slot] == SlotState.IDLE else None

    def take(self, slot: int, session_id: str) -> None:
        """Gives a slot to a session that is about to run. Forgets the session it held before."""
        previous = self._session_of_slot[slot]
        if previous is not None and previous != session_id:
            del self._slot_of_session[previous]
        if session_id not in self._slot_of_session:
            self._slot_of_session[session_id] = slot
        self._session_of_slot[slot] = (
            session_id if self._slot_of_session[session_id] == slot else None
        )
        self.state_S[slot] = SlotState.RUNNING

    def start(
        self, slot: int, request: GenerateRequest, prompt: np.ndarray, reused: int, most_tokens: int
    ) -> None:
        """Writes a request's tokens and settings. Its first `reused` tokens are cached already."""
        length = len(prompt)
        self.tokens_SC[slot, :length] = prompt
        self.context_S[slot] = length
        self.cached_S[slot] = reused
        self.routed_S[slot] = reused
        self.reported_S[slot] = min(self.reported_S[slot], reused)
        self.limit_S[slot] = min(length + request.max_new_tokens, most_tokens)
        self.seed_keys_S[slot] = seed_key(request.seed)
        self.temperature_S[slot] = request.temperature
        self.top_p_S[slot] = request.top_p
        self.top_k_S[slot] = request.top_k
        self.prompt_S[slot] = length
        self.drafts_proposed_S[slot] = self.drafts_used_S[slot] = 0
        self._set_stop_runs(slot, pack_stop_runs(request.stop_sequences))
        self.is_stop_SV[slot] = False
        self.is_stop_SV[slot, list(request.stop_token_ids)] = True

    def take_samples(
        self, slots_B: np.ndarray, tokens_Bm: np.ndarray, logprobs_Bm: np.ndarray, version: int
    ) -> AcceptedSamples:
        """Adds samples up to the first that differs from the draft written after the context. A
        stop token, a stop sequence or the limit may cut them. All tokens before them were fed.
        """
        accepted_B, gained_B, ends_B = np.empty((3, len(slots_B)), dtype=np.int64)
        totals = take_samples(
            self._arrays, slots_B, tokens_Bm, logprobs_Bm, version, accepted_B, gained_B, ends_B
        )
        return AcceptedSamples(accepted_B, gained_B, ends_B, *totals)

    def release(self, slot: int) -> None:
        """Ends a request. Its slot waits for the session's next turn, or is free if it has none."""
        self._uses += 1
        self._used_at_S[slot] = self._uses
        self.state_S[slot] = (
            SlotState.IDLE if self._session_of_slot[slot] is not None else SlotState.FREE
        )

    def forget_session(self, session_id: str) -> None:
        """Drops a session. Its request keeps the slot until it ends."""
        slot = self._slot_of_session.pop(session_id, None)
        if slot is None:
            return
        self._session_of_slot[slot] = None
        if self.state_S[slot] == SlotState.IDLE:
            self.state_S[slot] = SlotState.FREE

    def vacant_slot(self) -> int | None:
        """The lowest free slot, else the slot that is idle for longest, else None."""
        free = np.flatnonzero(self.state_S == SlotState.FREE)
        if len(free):
            return int(free[0])
        idle = np.flatnonzero(self.state_S == SlotState.IDLE)
        return int(idle[self._used_at_S[idle].argmin()]) if len(idle) else None

    def drop_idle(self) -> None:
        """Frees every slot that waits for a next turn."""
        for session_id, slot in list(self._slot_of_session.items()):
            if self.state_S[slot] == SlotState.IDLE:
                self.forget_session(session_id)

    def shared_prefix(self, slot: int, prompt: np.ndarray) -> int:
        """Length of the common prefix of a prompt and the fed part of a slot."""
        length = min(len(prompt), int(self.cached_S[slot]))
        differs = self.tokens_SC[slot, :length] != prompt[:length]
        return int(differs.argmax()) if differs.any() else length

    def find_prefix_slot(self, prompt: np.ndarray, version: int) -> tuple[int, int, int]:
        """(slot, usable, promised): the slot with the longest fed common prefix, its length, and
        the longest common prefix that any slot will have fed.

        A prefix is never shared across versions: all keys of a slot must come from `version`. Free
        slots count too, since their content is intact until they are taken.
        """
        lenders = np.flatnonzero((self.context_S > 0) & (self.oldest_version_S == version))
        if not len(lenders):
            return -1, 0, 0
        differs = self.tokens_SC[lenders, : len(prompt)] != prompt
        lengths = np.where(differs.any(axis=1), differs.argmax(axis=1), len(prompt))
        usable = np.minimum(lengths, self.cached_S[lenders])
        is_running = self.state_S[lenders] == SlotState.RUNNING
        promised = np.where(is_running, np.minimum(lengths, self.context_S[lenders]), usable)
        best = int(usable.argmax())
        return int(lenders[best]), int(usable[best]), int(promised.max())
