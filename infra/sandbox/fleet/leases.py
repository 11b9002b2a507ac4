"""Leases: who may use what until when.

A lease leaves the table exactly once: by release, by expiry or by withdrawal of its holder.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from ostinato.infra.platform.errors import SandboxError


@dataclass(slots=True)
class _Lease:
    length_seconds: float
    expires_at_seconds: float


class LeaseTable:
    """Live leases by id. Time is the caller's and must not run backwards."""

    def __init__(self) -> None:
        self._live: dict[str, _Lease] = {}
        # (time of expiry when pushed, id); a renewed lease is pushed again when it is reached
        self._by_expiry: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._live

    def __iter__(self) -> Iterator[str]:
        return iter(self._live)

    def grant(self, lease_id: str, length_seconds: float, now_seconds: float) -> None:
        """A new lease that runs for `length_seconds` from now."""
        if lease_id in self._live:
            raise SandboxError(f"lease {lease_id} is live already; wanted a new id")
        self._live[lease_id] = _Lease(length_seconds, now_seconds + length_seconds)
        heapq.heappush(self._by_expiry, (now_seconds + length_seconds, lease_id))

    def renew(self, lease_id: str, now_seconds: float) -> bool:
        """Give a lease its whole length again. False when its time is over, reaped or not."""
        lease = self._live.get(lease_id)
        if lease is None or lease.expires_at_seconds <= now_seconds:
            return False
        lease.expires_at_seconds = now_seconds + lease.length_seconds
        return True

    def release(self, lease_id: str) -> bool:
        """Take a lease out. False when it is not live any more."""
        return self._live.pop(lease_id, None) is not None

    def reap(self, now_seconds: float) -> list[str]:
        """Take out all leases whose time is over, earliest first."""
        reaped: list[str] = []
        while self._by_expiry and self._by_expiry[0][0] <= now_seconds:
            _, lease_id = heapq.heappop(self._by_expiry)
            lease = self._live.get(lease_id)
            if lease is None:
                continue
            if lease.expires_at_seconds > now_seconds:
                heapq.heappush(self._by_expiry, (lease.expires_at_seconds, lease_id))
            else:
                del self._live[lease_id]
                reaped.append(lease_id)
        return reaped
