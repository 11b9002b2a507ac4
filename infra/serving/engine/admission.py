"""Who waits for a full fleet, and in which order they come in.

`AdmissionQueue`: requests by priority (users, then evaluation, then training), first come first
served within one. No clock and no event loop: who waits is told by a callback. Nobody overtakes
within or above its priority, not even with a smaller request: a large one would starve.
"""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from ostinato.models.decode.protocol import Priority

_RANKS = {Priority.USER: 0, Priority.EVALUATION: 1, Priority.TRAINING: 2}


@dataclass(order=True, slots=True)
class Ticket:
    """One waiting request."""

    rank: int
    number: int
    session_id: str = field(compare=False)
    tokens: int = field(compare=False)
    context_tokens: int = field(compare=False)
    priority: Priority = field(compare=False)
    on_placed: Callable[[], None] = field(compare=False)
    replica_id: str | None = field(compare=False, default=None)
    is_withdrawn: bool = field(compare=False, default=False)


class AdmissionQueue:
    """Waiting requests of one fleet."""

    def __init__(self) -> None:
        self._heap: list[Ticket] = []
        self._numbers = itertools.count()
        self._waiting = dict.fromkeys(Priority, 0)

    def __len__(self) -> int:
        return sum(self._waiting.values())

    def waiting(self) -> dict[Priority, int]:
        """How many wait by priority."""
        return dict(self._waiting)

    def push(
        self,
        session_id: str,
        tokens: int,
        *,
        context_tokens: int,
        priority: Priority,
        on_placed: Callable[[], None],
    ) -> Ticket:
        """Lets a request wait; `on_placed` is called once it has a replica."""
        ticket = Ticket(
            _RANKS[priority],
            next(self._numbers),
            session_id,
            tokens,
            context_tokens,
            priority,
            on_placed,
        )
        heapq.heappush(self._heap, ticket)
        self._waiting[priority] += 1
        return ticket

    def withdraw(self, ticket: Ticket) -> None:
        """The caller gave up before a replica was found."""
        if ticket.replica_id is None and not ticket.is_withdrawn:
            ticket.is_withdrawn = True
            self._waiting[ticket.priority] -= 1

    def place(self, try_place: Callable[[Ticket], str | None]) -> int:
        """Offers the first in line to `try_place` until one finds no room; returns how many were placed."""
        placed = 0
        while self._heap:
            ticket = self._heap[0]
            if not ticket.is_withdrawn:
                ticket.replica_id = try_place(ticket)
                if ticket.replica_id is None:
                    return placed
                self._waiting[ticket.priority] -= 1
                placed += 1
                ticket.on_placed()
            heapq.heappop(self._heap)
        return placed
