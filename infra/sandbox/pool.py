"""Warm boxes of one repository, lent and taken back.

How many boxes exist, their replacement when one dies, who is served first, and the reaping of
leases whose holder fell silent. A lease always begins with a clean box. For boxes of many
repositories and machines see fleet/.
"""

import asyncio
import heapq
import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from ostinato.infra.platform.errors import CapacityExhausted, SandboxError, SandboxLost
from ostinato.infra.sandbox.fleet.leases import LeaseTable
from ostinato.infra.sandbox.fleet.records import Priority
from ostinato.infra.sandbox.namespace import NamespaceSandbox
from ostinato.infra.sandbox.protocol import SandboxLimits
from ostinato.infra.sandbox.repository import PreparedRepository

_REAPINGS_PER_LEASE = 4
_NEVER_SECONDS = float("inf")


class SandboxPool:
    """At most `size` boxes, made when first needed. Belongs to one event loop."""

    def __init__(
        self,
        repository: PreparedRepository,
        size: int,
        limits: SandboxLimits | None = None,
        *,
        lease_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`lease_seconds`: a lease not renewed for so long is reaped; None: never."""
        if size < 1:
            raise SandboxError(f"pool of {repository.name}: size is {size}, wanted at least 1")
        self.repository = repository
        self._limits = limits or SandboxLimits()
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._free: list[NamespaceSandbox] = []
        self._lent: dict[NamespaceSandbox, str] = {}  # with the id of its lease
        self._reaped: set[NamespaceSandbox] = set()  # ended here, not yet given back
        self._leases = LeaseTable()
        self._numbers = itertools.count(1)
        self._size = size
        self._num_slots = size
        self._line: list[tuple[int, int, asyncio.Future[None]]] = []  # heap: who is served first
        self._reaper: asyncio.Task[None] | None = None

    async def warm(self) -> None:
        """Start all boxes now."""
        while len(self._free) + len(self._lent) < self._size:
            self._free.append(await NamespaceSandbox.open(self.repository, self._limits))

    async def lease(
        self,
        files: Mapping[str, bytes | None] | None = None,
        wait_seconds: float = 120.0,
        priority: Priority = Priority.TRAINING,
    ) -> NamespaceSandbox:
        """A clean box with `files` laid over the pristine repository.

        Who waits is served by priority, then in turn. CapacityExhausted when none came free.
        """
        await self._take_slot(wait_seconds, priority)
        try:
            sandbox = await self._clean_box(files)
        except BaseException:
            self._free_slot()
            raise
        lease_id = f"{self.repository.name}-{next(self._numbers)}"
        seconds = _NEVER_SECONDS if self._lease_seconds is None else self._lease_seconds
        self._leases.grant(lease_id, lease_id, seconds, self._clock())
        self._lent[sandbox] = lease_id
        if self._reaper is None and self._lease_seconds is not None:
            self._reaper = asyncio.create_task(self._reap_often(self._lease_seconds))
        return sandbox

    def renew(self, sandbox: NamespaceSandbox) -> None:
        """Keep a lease alive for its whole length again. SandboxLost when it was reaped."""
        lease_id = self._lent.get(sandbox, "")
        if self._leases.renew(lease_id, self._clock()) is None:
            raise SandboxLost(
                f"pool of {self.repository.name}: this lease is over, its box goes to another; "
                f"wanted a renewal within {self._lease_seconds} s"
            )

    async def reap(self) -> int:
        """End the boxes of leases whose time is over; how many. The pool does this by itself."""
        over = {lease.lease_id for lease in self._leases.reap(self._clock())}
        boxes = [sandbox for sandbox, lease_id in self._lent.items() if lease_id in over]
        for sandbox in boxes:
            del self._lent[sandbox]
            self._reaped.add(sandbox)
            self._free_slot()
        for sandbox in boxes:
            await sandbox.close()
        return len(boxes)

    async def release(self, sandbox: NamespaceSandbox) -> None:
        """Take a box back.

        Everything that runs in it is ended. A lost box is replaced at a later lease; one that was
        reaped is no more.
        """
        if sandbox in self._reaped:
            self._reaped.discard(sandbox)
            return
        lease_id = self._lent.pop(sandbox, None)
        if lease_id is None:
            raise SandboxError(
                f"pool of {self.repository.name}: this box was not lent or was given back before"
            )
        self._leases.release(lease_id)
        try:
            await sandbox.reset()
            self._free.append(sandbox)
        except SandboxError:
            await sandbox.close()
        finally:
            self._free_slot()

    @asynccontextmanager
    async def leased(
        self, files: Mapping[str, bytes | None] | None = None
    ) -> AsyncIterator[NamespaceSandbox]:
        """Lease for the length of a block."""
        sandbox = await self.lease(files)
        try:
            yield sandbox
        finally:
            await self.release(sandbox)

    async def close(self) -> None:
        """End all boxes, lent ones too."""
        if self._reaper is not None:
            self._reaper.cancel()
            self._reaper = None
        boxes = [*self._free, *self._lent]
        self._free.clear()
        self._lent.clear()
        for sandbox in boxes:
            await sandbox.close()

    async def _reap_often(self, lease_seconds: float) -> None:
        while True:
            await asyncio.sleep(lease_seconds / _REAPINGS_PER_LEASE)
            await self.reap()

    async def _take_slot(self, wait_seconds: float, priority: Priority) -> None:
        if self._num_slots > 0:
            self._num_slots -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._line, (-priority, next(self._numbers), turn))
        try:
            async with asyncio.timeout(wait_seconds):
                await turn
        except TimeoutError as error:
            if turn.done() and not turn.cancelled():  # the slot came in the last moment
                return
            raise CapacityExhausted(
                f"pool of {self.repository.name}: none of {self._size} boxes came free "
                f"in {wait_seconds} s"
            ) from error
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the slot came as the caller left
                self._free_slot()
            raise

    def _free_slot(self) -> None:
        """Give a slot to the first who still waits."""
        while self._line:
            _, _, turn = heapq.heappop(self._line)
            if not turn.done():
                turn.set_result(None)
                return
        self._num_slots += 1

    async def _clean_box(self, files: Mapping[str, bytes | None] | None) -> NamespaceSandbox:
        while self._free:
            sandbox = self._free.pop()
            try:
                await sandbox.reset(files)
                return sandbox
            except SandboxLost:
                await sandbox.close()
        sandbox = await NamespaceSandbox.open(self.repository, self._limits)
        if files:
            await sandbox.reset(files)
        return sandbox
