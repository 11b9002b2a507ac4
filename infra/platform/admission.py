"""Requests that wait for capacity, and the rate at which new ones are let through.

Pure: time comes in as an argument, and nobody is woken here.
"""

import heapq
import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class _Entry(Generic[Item]):
    item: Item
    rank: int
    ticket: int  # place in line; a heap entry with another ticket is stale
    until_seconds: float


class AdmissionQueue(Generic[Item]):
    """Waiting requests by rank (the lowest first), in order of arrival within one rank.

    None is overtaken within or above its rank, not even by a smaller one: a large request would
    starve.
    """

    def __init__(self) -> None:
        self._live: dict[Hashable, _Entry[Item]] = {}
        self._line: list[tuple[int, int, Hashable]] = []
        self._by_patience: list[tuple[float, int, Hashable]] = []
        self._tickets = itertools.count(1)

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._live

    def push(
        self,
        key: Hashable,
        item: Item,
        *,
        rank: int,
        until_seconds: float = float("inf"),
        at_front: bool = False,
    ) -> None:
        """Adds a request to its rank, last or first. ValueError when the key waits already."""
        if key in self._live:
            raise ValueError(f"request {key!r} waits already; wanted a new key")
        ticket = next(self._tickets)
        ticket = -ticket if at_front else ticket
        self._live[key] = _Entry(item, rank, ticket, until_seconds)
        heapq.heappush(self._line, (rank, ticket, key))
        if until_seconds < float("inf"):
            heapq.heappush(self._by_patience, (until_seconds, ticket, key))

    def head(self) -> Item | None:
        """The request to be served before every other. None: nobody waits."""
        key = self._head_key()
        return None if key is None else self._live[key].item

    def place(self, try_place: Callable[[Item], bool]) -> int:
        """Offer the head until one finds no room. Returns how many were placed."""
        placed = 0
        while (key := self._head_key()) is not None and try_place(self._live[key].item):
            self.remove(key)
            placed += 1
        return placed

    def remove(self, key: Hashable) -> Item | None:
        """Take a request out. None when it does not wait."""
        entry = self._live.pop(key, None)
        return None if entry is None else entry.item

    def expire(self, now_seconds: float) -> list[Item]:
        """Take out the requests that have waited as long as they wanted to, earliest first."""
        expired: list[Item] = []
        while self._by_patience and self._by_patience[0][0] <= now_seconds:
            _, ticket, key = heapq.heappop(self._by_patience)
            entry = self._live.get(key)
            if entry is not None and entry.ticket == ticket:
                self.remove(key)
                expired.append(entry.item)
        return expired

    def _head_key(self) -> Hashable | None:
        while self._line:
            _, ticket, key = self._line[0]
            entry = self._live.get(key)
            if entry is not None and entry.ticket == ticket:
                return key
            heapq.heappop(self._line)
        return None


class TokenBucket:
    """Tokens that grow at a steady rate up to a burst. Each admission takes one.

    In any span of t seconds at most burst + rate * t are taken.
    """

    __slots__ = ("_burst", "_level", "_per_second", "_seen_at_seconds")

    def __init__(self, per_second: float, burst: int, now_seconds: float) -> None:
        self._per_second = per_second
        self._burst = burst
        self._level = float(burst)
        self._seen_at_seconds = now_seconds

    def seconds_until_token(self, now_seconds: float) -> float:
        """0 when a token is there, else the seconds until one will be."""
        # a clock that stands still or steps back gives nothing
        passed_seconds = now_seconds - self._seen_at_seconds
        if passed_seconds > 0:
            self._level = min(self._burst, self._level + passed_seconds * self._per_second)
            self._seen_at_seconds = now_seconds
        return max(0.0, (1.0 - self._level) / self._per_second)

    def take(self, now_seconds: float) -> bool:
        """Take a token if there is one."""
        if self.seconds_until_token(now_seconds) > 0:
            return False
        self._level -= 1.0
        return True
