"""Who may use what until when.

`LeaseTable`: grants, renewals, releases, and the reaper's question which leases have run out. A
lease leaves the table exactly once: by release, by expiry or by withdrawal of its holder. It does
not know boxes or nodes.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from ostinato.infra.platform.errors import SandboxError


@dataclass(slots=True)
class Lease:
    """A holder's right to a box."""

    lease_id: str
    holder_id: str
    length_seconds: float
    expires_at_seconds: float


class LeaseTable:
    """Live leases. Time is the caller's and must not run backwards."""

    def __init__(self) -> None:
        self._live: dict[str, Lease] = {}
        # (time of expiry when pushed, id); a renewed lease is pushed again when it is reached
        self._by_expiry: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._live

    def __iter__(self) -> Iterator[str]:
        return iter(self._live)

    def grant(
        self, lease_id: str, holder_id: str, length_seconds: float, now_seconds: float
    ) -> Lease:
        """A new lease that runs for `length_seconds` from now."""
        if lease_id in self._live:
            raise SandboxError(f"lease {lease_id} is live already; wanted a new id")
        lease = Lease(lease_id, holder_id, length_seconds, now_seconds + length_seconds)
        self._live[lease_id] = lease
        heapq.heappush(self._by_expiry, (lease.expires_at_seconds, lease_id))
        return lease

    def renew(self, lease_id: str, now_seconds: float) -> Lease | None:
        """The lease with its whole length before it again. None when it is not live any more.

        One whose time is over is not revived, reaped or not.
        """
        lease = self._live.get(lease_id)
        if lease is None or lease.expires_at_seconds <= now_seconds:
            return None
        lease.expires_at_seconds = now_seconds + lease.length_seconds
        return lease

    def release(self, lease_id: str) -> Lease | None:
        """Take a lease out. None when it is not live any more."""
        return self._live.pop(lease_id, None)

    def reap(self, now_seconds: float) -> list[Lease]:
        """Take out all leases whose time is over, earliest first."""
        reaped: list[Lease] = []
        while self._by_expiry and self._by_expiry[0][0] <= now_seconds:
            _, lease_id = heapq.heappop(self._by_expiry)
            lease = self._live.get(lease_id)
            if lease is None:
                continue
            if lease.expires_at_seconds > now_seconds:
                heapq.heappush(self._by_expiry, (lease.expires_at_seconds, lease_id))
                continue
            reaped.append(self._live.pop(lease_id))
        return reaped
