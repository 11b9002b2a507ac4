"""Conversations in memory: which tokens a client's messages stand for.

A chat client sends the whole history each time; when that history is one the gateway wrote, its
exact tokens are continued (token in, token out) instead of being encoded again. Histories are found
by a hash of owner and messages, so a stock OpenAI client needs no session id. Oldest and idle
conversations are forgotten.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ostinato.infra.serving.gateway.schemas import ChatMessage

Kept = TypeVar("Kept")


class IdleStore(Generic[Kept]):
    """Bounded dictionary that drops entries idle for `idle_seconds`, and the oldest used."""

    def __init__(self, max_entries: int, idle_seconds: float) -> None:
        self._max_entries, self._idle_seconds = max_entries, idle_seconds
        self._entries: OrderedDict[str, tuple[float, Kept]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: str, now: float) -> Kept | None:
        """The conversation kept under `key`. Using it keeps it longer."""
        self._forget(now)
        found = self._entries.get(key)
        if found is None:
            return None
        self.put(key, found[1], now)
        return found[1]

    def put(self, key: str, value: Kept, now: float) -> None:
        """Keeps or replaces."""
        self._entries[key] = (now, value)
        self._entries.move_to_end(key)
        self._forget(now)

    def remove(self, key: str) -> None:
        """Forgets now."""
        self._entries.pop(key, None)

    def _forget(self, now: float) -> None:
        while self._entries:
            oldest = next(iter(self._entries))
            is_idle = now - self._entries[oldest][0] > self._idle_seconds
            if not is_idle and len(self._entries) <= self._max_entries:
                return
            del self._entries[oldest]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat so far. `token_ids` stand for all messages up to and including the last answer."""

    session_id: str
    token_ids: tuple[int, ...]


def history_key(owner: str, messages: Sequence[ChatMessage]) -> str:
    """A hash of who said what. The same for the same history of the same owner."""
    said = [
        [
            "system" if message.role == "developer" else message.role,
            message.text,
            [
                [call.id, call.function.name, call.function.arguments]
                for call in message.tool_calls or []
            ],
            message.tool_call_id,
        ]
        for message in messages
    ]
    return hashlib.sha256(json.dumps([owner, said]).encode()).hexdigest()
