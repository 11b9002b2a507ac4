"""Which replica serves which request: session affinity first, then least outstanding tokens.

Owns `RequestRouter`, a pure object without clock, Ray or threads. Enters: sessions, token counts,
replica states. Leaves: a replica id. It sends nothing.
"""

from collections import OrderedDict
from dataclasses import dataclass

from infra.engine.states import ReplicaState
from infra.errors import EngineError

_SESSIONS_REMEMBERED = 100_000


@dataclass(slots=True)
class _Load:
    state: ReplicaState
    outstanding_tokens: int = 0
    outstanding_requests: int = 0
    given_tokens: int = 0  # since the start: decides between equally busy replicas


class RequestRouter:
    """Keeps a conversation where its cache is, unless that replica is far busier than another."""

    def __init__(
        self,
        replica_ids: list[str],
        *,
        state: ReplicaState = ReplicaState.SERVING,
        steal_margin_tokens: int = 16_384,
    ) -> None:
        if not replica_ids:
            raise EngineError("request router got 0 replicas, wanted at least 1")
        self._loads = {replica_id: _Load(state) for replica_id in replica_ids}
        self._home: OrderedDict[str, str] = (
            OrderedDict()
        )  # session -> replica, least recently used first
        self._steal_margin_tokens = steal_margin_tokens

    def choose(self, session_id: str, tokens: int) -> str:
        """Assigns a request of `tokens` (prompt plus answer at most) until `finish` is told."""
        serving = {
            name: load for name, load in self._loads.items() if load.state is ReplicaState.SERVING
        }
        if not serving:
            raise EngineError(
                f"no replica serves session {session_id}: {self.describe()}, wanted one serving"
            )
        least = min(
            serving, key=lambda name: (serving[name].outstanding_tokens, serving[name].given_tokens)
        )
        home = self._home.get(session_id)
        if home not in serving or self._is_far_busier(home, least):
            home = least
        self._home[session_id] = home
        self._home.move_to_end(session_id)
        if len(self._home) > _SESSIONS_REMEMBERED:
            self._home.popitem(last=False)
        self._loads[home].outstanding_tokens += tokens
        self._loads[home].outstanding_requests += 1
        self._loads[home].given_tokens += tokens
        return home

    def finish(self, replica_id: str, tokens: int) -> None:
        """Takes back what `choose` counted."""
        self._loads[replica_id].outstanding_tokens -= tokens
        self._loads[replica_id].outstanding_requests -= 1

    def end_session(self, session_id: str) -> str | None:
        """Forgets a session; returns the replica that holds its cache."""
        return self._home.pop(session_id, None)

    def set_state(self, replica_id: str, state: ReplicaState) -> None:
        """Takes note of a replica's state; sessions of one that does not serve go elsewhere."""
        self._loads[replica_id].state = state

    def states(self) -> dict[str, ReplicaState]:
        """State by replica."""
        return {name: load.state for name, load in self._loads.items()}

    def outstanding_requests(self) -> dict[str, int]:
        """Requests under way by replica."""
        return {name: load.outstanding_requests for name, load in self._loads.items()}

    def describe(self) -> str:
        """One line for messages."""
        return ", ".join(
            f"{name} {load.state} {load.outstanding_tokens} tokens"
            for name, load in self._loads.items()
        )

    def _is_far_busier(self, home: str, least: str) -> bool:
        gap = self._loads[home].outstanding_tokens - self._loads[least].outstanding_tokens
        return gap > self._steal_margin_tokens
