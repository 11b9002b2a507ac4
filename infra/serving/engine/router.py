"""Which replica serves which request: session affinity first, then least outstanding tokens.

It sends nothing and lets nobody wait: `admission` does.

A session stays where its keys and values are. At the start of a turn it moves when its replica is
busier than the least busy one by more than the margin plus what feeding its context again costs.
"""

import heapq
from collections import OrderedDict
from dataclasses import dataclass, field

from ostinato.infra.platform.errors import EngineError
from ostinato.infra.serving.engine.states import ReplicaState
from ostinato.models.decode.protocol import Priority

_SESSIONS_REMEMBERED = 100_000


@dataclass(frozen=True, slots=True)
class RouterLimits:
    """Load limits per replica, and the margin at which a session moves."""

    max_outstanding_tokens: int | None = None  # of one replica; None: no bound
    training_share: float = 0.9  # of that bound, so that a user finds room at once
    evaluation_share: float = 0.95
    steal_margin_tokens: int = 16_384
    prefill_cost: float = 0.0  # tokens of work a token of context that is fed again counts as

    def bound(self, priority: Priority) -> float:
        """Outstanding tokens up to which a replica takes requests of this priority."""
        if self.max_outstanding_tokens is None:
            return float("inf")
        shares = {
            Priority.USER: 1.0,
            Priority.EVALUATION: self.evaluation_share,
            Priority.TRAINING: self.training_share,
        }
        return shares[priority] * self.max_outstanding_tokens


@dataclass(slots=True)
class _Load:
    state: ReplicaState
    outstanding_tokens: int = 0
    outstanding_requests: int = 0
    given_tokens: int = 0  # since the start: decides between equally busy replicas


@dataclass(slots=True)
class _LeastBusy:
    """Serving replicas by load. Old entries stay in the heap until they come to its top."""

    loads: dict[str, _Load]
    heap: list[tuple[int, int, str]] = field(default_factory=list)

    def note(self, name: str) -> None:
        """The load or state of a replica changed."""
        load = self.loads[name]
        if load.state is ReplicaState.SERVING:
            heapq.heappush(self.heap, (load.outstanding_tokens, load.given_tokens, name))

    def peek(self) -> str | None:
        """The least busy serving replica. Of equals the one that was given least so far."""
        if len(self.heap) > 64 + 8 * len(self.loads):
            self.heap = []
            for name in self.loads:
                self.note(name)
        while self.heap:
            outstanding, given, name = self.heap[0]
            load = self.loads.get(name)
            if (
                load is not None
                and load.state is ReplicaState.SERVING
                and (load.outstanding_tokens, load.given_tokens) == (outstanding, given)
            ):
                return name
            heapq.heappop(self.heap)
        return None


class RequestRouter:
    """Keeps a conversation where its cache is, unless that replica is far busier than another."""

    def __init__(
        self,
        replica_ids: list[str],
        *,
        state: ReplicaState = ReplicaState.SERVING,
        steal_margin_tokens: int = 16_384,
        limits: RouterLimits | None = None,
    ) -> None:
        if not replica_ids:
            raise EngineError("request router got 0 replicas, wanted at least 1")
        self._limits = limits or RouterLimits(steal_margin_tokens=steal_margin_tokens)
        self._loads: dict[str, _Load] = {}
        self._least_busy = _LeastBusy(self._loads)
        # session -> replica, least recently used first
        self._home: OrderedDict[str, str] = OrderedDict()
        self.moved_sessions = 0  # turns that began away from the session's cache
        for replica_id in replica_ids:
            self._loads[replica_id] = _Load(state)
            self._least_busy.note(replica_id)

    def choose(
        self,
        session_id: str,
        tokens: int,
        *,
        priority: Priority = Priority.TRAINING,
        context_tokens: int = 0,
    ) -> str:
        """As try_choose. EngineError when every serving replica is full."""
        chosen = self.try_choose(
            session_id, tokens, priority=priority, context_tokens=context_tokens
        )
        if chosen is None:
            raise EngineError(
                f"no replica has room for {tokens} tokens of session {session_id}: {self.describe()}, "
                f"wanted one under {self._limits.bound(priority):.0f}"
            )
        return chosen

    def try_choose(
        self,
        session_id: str,
        tokens: int,
        *,
        priority: Priority = Priority.TRAINING,
        context_tokens: int = 0,
    ) -> str | None:
        """Assigns a request of `tokens` (prompt plus answer at most) until `finish` is told.

        None when every serving replica is full for this priority; a replica without any request is never full.
        `context_tokens` are those that would be fed again elsewhere. EngineError when none serves.
        """
        least = self._least_busy.peek()
        if least is None:
            raise EngineError(
                f"no replica serves session {session_id}: {self.describe()}, wanted one serving"
            )
        bound = self._limits.bound(priority)
        previous = self._home.get(session_id)
        home = previous
        if (
            home is None
            or not self._serves(home)
            or self._is_far_busier(home, least, context_tokens)
            or not self._has_room(home, tokens, bound)
        ):
            home = least
        if not self._has_room(home, tokens, bound):
            return None
        if previous not in (None, home):
            self.moved_sessions += 1
        self._home[session_id] = home
        self._home.move_to_end(session_id)
        if len(self._home) > _SESSIONS_REMEMBERED:
            self._home.popitem(last=False)
        self._loads[home].outstanding_tokens += tokens
        self._loads[home].outstanding_requests += 1
        self._loads[home].given_tokens += tokens
        self._least_busy.note(home)
        return home

    def finish(self, replica_id: str, tokens: int) -> None:
        """Takes back what `choose` counted."""
        self._loads[replica_id].outstanding_tokens -= tokens
        self._loads[replica_id].outstanding_requests -= 1
        self._least_busy.note(replica_id)

    def end_session(self, session_id: str) -> str | None:
        """Forgets a session. Returns the replica that holds its cache."""
        home = self._home.pop(session_id, None)
        return home if home in self._loads else None

    def set_state(self, replica_id: str, state: ReplicaState) -> None:
        """Takes note of a replica's state. Sessions of one that does not serve go elsewhere."""
        self._loads[replica_id].state = state
        self._least_busy.note(replica_id)

    def states(self) -> dict[str, ReplicaState]:
        """State by replica."""
        return {name: load.state for name, load in self._loads.items()}

    def is_serving(self) -> bool:
        """Whether any replica serves."""
        return self._least_busy.peek() is not None

    def outstanding_requests(self) -> dict[str, int]:
        """Requests under way by replica."""
        return {name: load.outstanding_requests for name, load in self._loads.items()}

    def outstanding_tokens(self) -> dict[str, int]:
        """Tokens promised by replica."""
        return {name: load.outstanding_tokens for name, load in self._loads.items()}

    def describe(self) -> str:
        """One line for messages. Of a large fleet its first replicas."""
        shown = [
            f"{name} {load.state} {load.outstanding_tokens} tokens"
            for name, load in list(self._loads.items())[:8]
        ]
        return ", ".join(shown) + (
            f" and {len(self._loads) - 8} more" if len(self._loads) > 8 else ""
        )

    def _serves(self, name: str) -> bool:
        load = self._loads.get(name)
        return load is not None and load.state is ReplicaState.SERVING

    def _has_room(self, name: str, tokens: int, bound: float) -> bool:
        load = self._loads[name]
        return load.outstanding_requests == 0 or load.outstanding_tokens + tokens <= bound

    def _is_far_busier(self, home: str, least: str, context_tokens: int) -> bool:
        gap = self._loads[home].outstanding_tokens - self._loads[least].outstanding_tokens
        cost = self._limits.prefill_cost * context_tokens
        return gap > self._limits.steal_margin_tokens + cost
