"""Requests that wait for a box.

`AdmissionQueue`: strict priority and, within it, order of arrival; a bound a priority beyond which
it refuses at once (back-pressure); and how long each request is ready to wait. Requests of one
place class compete with one another only. It does not place.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from ostinato.infra.platform.errors import CapacityExhausted, SandboxError
from ostinato.infra.sandbox.fleet.records import BoxRequest, Priority

PlaceClass = tuple[str, str]
HIGHEST_FIRST = tuple(sorted(Priority, reverse=True))


@dataclass(slots=True)
class Waiting:
    """A request in the queue, or on its way to a box."""

    request: BoxRequest
    place_class: PlaceClass
    give_up_at_seconds: float
    num_tries: int = 0  # starts that failed
    num_moves: int = 0  # boxes that its lease has lost; above 0 the lease is live while it waits
    ticket: int = -1  # place in line; an entry of a line with another ticket is stale


class AdmissionQueue:
    """All waiting requests of a fleet."""

    def __init__(self, most_waiting: Mapping[Priority, int]) -> None:
        self._most_waiting = dict(most_waiting)
        self._lines: dict[PlaceClass, dict[Priority, deque[tuple[int, str]]]] = {}
        self._tickets = itertools.count()
        self._live: dict[str, Waiting] = {}
        self._num_waiting = dict.fromkeys(Priority, 0)
        self._by_patience: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    def num_waiting(self, priority: Priority) -> int:
        """How many requests of a priority wait."""
        return self._num_waiting[priority]

    @property
    def place_classes(self) -> list[PlaceClass]:
        """Classes that ever had a request."""
        return list(self._lines)

    def push(self, waiting: Waiting) -> None:
        """Put a new request at the end of its line. CapacityExhausted when the line is full."""
        priority = waiting.request.priority
        limit = self._most_waiting[priority]
        if self._num_waiting[priority] >= limit:
            raise CapacityExhausted(
                f"request {waiting.request.request_id}: {limit} requests of priority "
                f"{priority.name.lower()} wait already, which is the limit; ask again later"
            )
        self._enter(waiting, at_front=False)

    def push_front(self, waiting: Waiting) -> None:
        """Put a request that had its turn, and lost its box, before all others of its priority.

        It was admitted once, so the bound does not count.
        """
        self._enter(waiting, at_front=True)

    def head(self, place_class: PlaceClass) -> Waiting | None:
        """The request that must be served before every other of its class."""
        lines = self._lines.get(place_class)
        if lines is None:
            return None
        for priority in HIGHEST_FIRST:
            line = lines[priority]
            while line:
                ticket, request_id = line[0]
                waiting = self._live.get(request_id)
                if waiting is not None and waiting.ticket == ticket:
                    return waiting
                line.popleft()
        return None

    def remove(self, request_id: str) -> Waiting | None:
        """Take a request out; None when it does not wait."""
        waiting = self._live.pop(request_id, None)
        if waiting is not None:
            self._num_waiting[waiting.request.priority] -= 1
        return waiting

    def give_up(self, now_seconds: float) -> list[Waiting]:
        """Take out the requests that have waited as long as they wanted to."""
        tired: list[Waiting] = []
        while self._by_patience and self._by_patience[0][0] <= now_seconds:
            _, request_id = heapq.heappop(self._by_patience)
            waiting = self._live.get(request_id)
            if waiting is not None and waiting.give_up_at_seconds <= now_seconds:
                self.remove(request_id)
                tired.append(waiting)
        return tired

    def _enter(self, waiting: Waiting, *, at_front: bool) -> None:
        request = waiting.request
        if request.request_id in self._live:
            raise SandboxError(f"request {request.request_id} waits already; wanted a new id")
        lines = self._lines.setdefault(
            waiting.place_class, {priority: deque() for priority in HIGHEST_FIRST}
        )
        waiting.ticket = next(self._tickets)
        entry = (waiting.ticket, request.request_id)
        if at_front:
            lines[request.priority].appendleft(entry)
        else:
            lines[request.priority].append(entry)
        self._live[request.request_id] = waiting
        self._num_waiting[request.priority] += 1
        heapq.heappush(self._by_patience, (waiting.give_up_at_seconds, request.request_id))
