"""Choice of the replica for a request: session affinity first, then least outstanding tokens.

A session stays on the replica that caches it. At the start of a turn it moves when that replica is
busier than the least busy one by more than the margin. Each engine orders its own requests.
"""

import heapq
from collections import OrderedDict
from dataclasses import dataclass

from ostinato.infra.platform.errors import EngineError
from ostinato.infra.serving.engine.health import ReplicaState

_SESSIONS_REMEMBERED = 100_000
_ENTRIES_PER_REPLICA = 8  # in the heap, including stale ones, before it is rebuilt
STEAL_MARGIN_TOKENS = 16_384  # excess of a replica's tokens above which sessions leave it


@dataclass(slots=True)
class _Load:
    state: ReplicaState
    outstanding_tokens: int = 0
    given_tokens: int = 0  # since the start: decides between equally busy replicas


class RequestRouter:
    """Keeps a conversation where its cache is, unless that replica is far busier than another."""

    def __init__(
        self,
        replica_ids: list[str],
        *,
        state: ReplicaState = ReplicaState.SERVING,
        steal_margin_tokens: int = STEAL_MARGIN_TOKENS,
    ) -> None:
        if not replica_ids:
            raise EngineError("request router got 0 replicas, wanted at least 1")
        self._steal_margin_tokens = steal_margin_tokens
        # session -> replica, least recently used first
        self._home: OrderedDict[str, str] = OrderedDict()
        self._loads = {replica_id: _Load(state) for replica_id in replica_ids}
        # (outstanding, given, replica): each change adds an entry, stale ones are dropped at the top
        self._by_load: list[tuple[int, int, str]] = []
        self._rebuild_heap()

    def choose(self, session_id: str, tokens: int) -> str:
        """The replica for a request, which adds at most `tokens` until `finish`. EngineError when none serves."""
        least = self._least_busy()
        if least is None:
            raise EngineError(
                f"no replica serves session {session_id}: {self.describe()}, wanted one serving"
            )
        home = self._home.get(session_id)
        if home is None or not self._serves(home) or self._is_far_busier(home, least):
            home = least
        self._home[session_id] = home
        self._home.move_to_end(session_id)
        if len(self._home) > _SESSIONS_REMEMBERED:
            self._home.popitem(last=False)
        self._loads[home].outstanding_tokens += tokens
        self._loads[home].given_tokens += tokens
        self._push_entry(home)
        return home

    def finish(self, replica_id: str, tokens: int) -> None:
        """Subtracts the tokens that `choose` added, when the request has ended."""
        self._loads[replica_id].outstanding_tokens -= tokens
        self._push_entry(replica_id)

    def end_session(self, session_id: str) -> str | None:
        """Forgets a session. Returns the replica that holds its cache."""
        home = self._home.pop(session_id, None)
        return home if home in self._loads else None

    def set_state(self, replica_id: str, state: ReplicaState) -> None:
        """Sets a replica's state. Sessions of a replica that does not serve move to others."""
        self._loads[replica_id].state = state
        self._push_entry(replica_id)

    def states(self) -> dict[str, ReplicaState]:
        """State by replica."""
        return {name: load.state for name, load in self._loads.items()}

    def is_serving(self) -> bool:
        """Whether any replica serves."""
        return self._least_busy() is not None

    def outstanding_tokens(self) -> dict[str, int]:
        """Outstanding tokens by replica."""
        return {name: load.outstanding_tokens for name, load in self._loads.items()}

    def describe(self) -> str:
        """State and tokens of the first 8 replicas, in one line for messages."""
        shown = [
            f"{name} {load.state} {load.outstanding_tokens} tokens"
            for name, load in list(self._loads.items())[:8]
        ]
        return ", ".join(shown) + (
            f" and {len(self._loads) - 8} more" if len(self._loads) > 8 else ""
        )

    def _serves(self, name: str) -> bool:
        return self._loads[name].state is ReplicaState.SERVING

    def _least_busy(self) -> str | None:
        """The least busy serving replica. Among equals, the one that got the fewest tokens so far."""
        while self._by_load:
            entry = self._by_load[0]
            if entry == self._entry(entry[-1]) and self._serves(entry[-1]):
                return entry[-1]
            heapq.heappop(self._by_load)
        return None

    def _push_entry(self, name: str) -> None:
        heapq.heappush(self._by_load, self._entry(name))
        if len(self._by_load) > _ENTRIES_PER_REPLICA * len(self._loads):
            self._rebuild_heap()

    def _rebuild_heap(self) -> None:
        self._by_load = [self._entry(name) for name in self._loads]
        heapq.heapify(self._by_load)

    def _entry(self, name: str) -> tuple[int, int, str]:
        load = self._loads[name]
        return load.outstanding_tokens, load.given_tokens, name

    def _is_far_busier(self, home: str, least: str) -> bool:
        gap = self._loads[home].outstanding_tokens - self._loads[least].outstanding_tokens
        return gap > self._steal_margin_tokens
