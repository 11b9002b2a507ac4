"""The boxes of one machine. Each is new, and leased to one client until the client releases it or stops renewing."""

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from ostinato.infra.platform.errors import (
    CapacityExhausted,
    SandboxError,
    SandboxHostLost,
    SandboxLost,
)
from ostinato.infra.platform.telemetry import fields
from ostinato.infra.sandbox.backends import open_backend
from ostinato.infra.sandbox.protocol import Sandbox, SandboxKind, SandboxLimits, SandboxSpec
from ostinato.infra.sandbox.repository import PreparedRepository

_logger = logging.getLogger(__name__)

# operations that a client may call on its box
BOX_OPERATIONS = frozenset(("request", "diff"))
# more concurrent starts would compete for the processors until they exceed the start limit
_STARTS_AT_A_TIME = 16
_REAP_SECONDS = 0.25
# Expected use of a box. An agent's box mostly waits for the model, so reserving the limits of all boxes would
# leave machines idle.
_BOXES_PER_CORE = 36
_BYTES_PER_BOX = 64 << 20
_FILLED_SHARE = 0.9


@dataclass(frozen=True)
class NodeLoad:
    """Load of a node: leased boxes, waiting requests, its capacity, and how busy its machine is."""

    leased: int
    waiting: int
    max_boxes: int
    pressure: float

    def score(self, num_coming: int) -> float:
        """Lower is better. `num_coming`: requests in flight that the node has not counted."""
        return (self.leased + self.waiting + num_coming) / self.max_boxes + self.pressure


@dataclass
class _Lease:
    """A box that is leased until a time of the monotonic clock, unless it is renewed."""

    box: Sandbox
    seconds: float
    until: float

    @property
    def has_expired(self) -> bool:
        return self.until <= time.monotonic()


class BoxNode:
    """Leases out the boxes of this machine. Belongs to one event loop."""

    def __init__(
        self,
        repositories: Mapping[str, PreparedRepository],
        limits: SandboxLimits,
        kind: SandboxKind = SandboxKind.NAMESPACE,
        max_boxes: int | None = None,
    ) -> None:
        """`max_boxes` None: as many as fit the machine."""
        self._repositories = dict(repositories)
        self._limits = limits
        self._backend = open_backend(kind)
        self._max_boxes = max_boxes or _estimate_capacity()
        self._capacity = asyncio.Semaphore(self._max_boxes)
        self._starts = asyncio.Semaphore(_STARTS_AT_A_TIME)
        self._pending: dict[str, asyncio.Task[None]] = {}  # by lease id: waiting or starting
        self._leases: dict[str, _Lease] = {}
        # leases of boxes that ended by themselves; the client's next call raises the reason
        self._ended: dict[str, _Lease] = {}
        self._reaping: asyncio.Task[None] | None = None

    async def load(self) -> NodeLoad:
        """The present load of the node."""
        return NodeLoad(len(self._leases), len(self._pending), self._max_boxes, _read_pressure())

    async def acquire(
        self, lease_id: str, repository: str, lease_seconds: float, wait_seconds: float
    ) -> None:
        """Leases a new box under an id that the caller chooses; returns when it runs. Requests are served in
        order. Raises CapacityExhausted when no box became free in time.
        """
        if self._reaping is None:
            self._reaping = asyncio.create_task(self._reap())
        self._ended.pop(lease_id, None)
        start = self._start(lease_id, repository, lease_seconds, wait_seconds)
        task = self._pending[lease_id] = asyncio.create_task(start)
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
            del self._pending[lease_id]
        if task.cancelled():
            raise SandboxLost(f"request {lease_id} was withdrawn")
        task.result()

    async def renew(self, lease_ids: Iterable[str]) -> list[str]:
        """Renews leases for their full duration. Returns the ids of those that have ended."""
        ended = []
        for lease_id in lease_ids:
            lease = self._find(lease_id)
            if lease is None or lease.has_expired:
                ended.append(lease_id)
            else:
                lease.until = time.monotonic() + lease.seconds
        return ended

    async def release(self, lease_id: str) -> None:
        """Ends a lease and its box, or withdraws a waiting request. Does nothing if the lease has ended."""
        if lease_id in self._pending:
            self._pending[lease_id].cancel()
        self._ended.pop(lease_id, None)
        await self._end_box(lease_id)

    async def call(self, lease_id: str, operation: str, *arguments: Any, **named: Any) -> Any:
        """Calls an operation on a box. Raises SandboxHostLost if the box is not on this node, and the reason of its
        end if it ended by itself.
        """
        if operation not in BOX_OPERATIONS:
            raise SandboxError(
                f"{operation} on box {lease_id}: wanted one of {', '.join(sorted(BOX_OPERATIONS))}"
            )
        lease = self._find(lease_id)
        if lease is None:
            raise SandboxHostLost(
                f"box {lease_id} is not leased here, wanted a lease that was renewed in time"
            )
        return await getattr(lease.box, operation)(*arguments, **named)

    async def close(self) -> None:
        """Ends every box and withdraws all waiting requests."""
        if self._reaping is not None:
            self._reaping.cancel()
        for lease_id in (*self._pending, *self._leases):
            await self.release(lease_id)
        await self._backend.close()

    async def _start(
        self, lease_id: str, repository: str, lease_seconds: float, wait_seconds: float
    ) -> None:
        prepared = self._repositories.get(repository)
        if prepared is None:
            names = ", ".join(sorted(self._repositories)) or "none"
            raise SandboxError(
                f"repository {repository} is not on this node; wanted one of: {names}"
            )
        try:
            async with asyncio.timeout(wait_seconds):
                await self._capacity.acquire()
        except TimeoutError:
            raise CapacityExhausted(
                f"request {lease_id} got no box in {wait_seconds:.0f} s: all {self._max_boxes} are leased "
                f"and {len(self._pending)} requests wait"
            ) from None
        try:
            async with self._starts:
                spec = SandboxSpec(repository=prepared.directory, limits=self._limits)
                box = await self._backend.create(spec)
        except BaseException:
            self._capacity.release()
            raise
        self._leases[lease_id] = _Lease(box, lease_seconds, time.monotonic() + lease_seconds)

    def _find(self, lease_id: str) -> _Lease | None:
        return self._leases.get(lease_id) or self._ended.get(lease_id)

    async def _end_box(self, lease_id: str) -> None:
        lease = self._leases.pop(lease_id, None)
        if lease is not None:
            try:
                await lease.box.close()
            finally:
                self._capacity.release()

    async def _reap(self) -> None:
        """Ends expired leases and lost boxes. Runs until cancelled."""
        while True:
            for lease_id, lease in [*self._leases.items(), *self._ended.items()]:
                try:
                    if lease.has_expired:
                        _logger.info("lease expired %s", fields(lease=lease_id))
                        await self.release(lease_id)
                    elif lease.box.is_lost and lease_id in self._leases:
                        self._ended[lease_id] = lease
                        await self._end_box(lease_id)
                except SandboxError as error:
                    _logger.warning("box did not end %s", fields(lease=lease_id, error=str(error)))
                except Exception:  # the loop must go on, or no other lease would end
                    _logger.exception("box did not end %s", fields(lease=lease_id))
            await asyncio.sleep(_REAP_SECONDS)


def _read_pressure() -> float:
    """Load average per core plus the share of memory in use. Near 0 for an idle machine."""
    return (
        psutil.getloadavg()[0] / (psutil.cpu_count() or 1) + psutil.virtual_memory().percent / 100
    )


def _estimate_capacity() -> int:
    """Number of boxes that this machine can hold at the same time, at least one."""
    memory = psutil.virtual_memory().total * _FILLED_SHARE / _BYTES_PER_BOX
    return max(1, int(min((psutil.cpu_count() or 1) * _BOXES_PER_CORE, memory)))
