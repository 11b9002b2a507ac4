"""Warm boxes of one repository, lent and taken back.

Owns how many boxes exist and their replacement when one dies. A lease always begins with a clean
box.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from infra.errors import CapacityExhausted, SandboxError, SandboxLost
from infra.sandbox.namespace import NamespaceSandbox
from infra.sandbox.protocol import SandboxLimits
from infra.sandbox.repository import PreparedRepository


class SandboxPool:
    """At most `size` boxes, made when first needed. Belongs to one event loop."""

    def __init__(
        self, repository: PreparedRepository, size: int, limits: SandboxLimits | None = None
    ) -> None:
        if size < 1:
            raise SandboxError(f"pool of {repository.name}: size is {size}, wanted at least 1")
        self.repository = repository
        self._limits = limits or SandboxLimits()
        self._free: list[NamespaceSandbox] = []
        self._lent: set[NamespaceSandbox] = set()
        self._size = size
        self._slots = asyncio.Semaphore(size)

    async def warm(self) -> None:
        """Start all boxes now."""
        while len(self._free) + len(self._lent) < self._size:
            self._free.append(await NamespaceSandbox.open(self.repository, self._limits))

    async def lease(
        self, files: Mapping[str, bytes | None] | None = None, wait_seconds: float = 120.0
    ) -> NamespaceSandbox:
        """A clean box with `files` laid over the pristine repository.

        CapacityExhausted when none came free.
        """
        try:
            await asyncio.wait_for(self._slots.acquire(), wait_seconds)
        except TimeoutError as error:
            raise CapacityExhausted(
                f"pool of {self.repository.name}: none of {self._size} boxes came free "
                f"in {wait_seconds} s"
            ) from error
        try:
            sandbox = await self._clean_box(files)
        except BaseException:
            self._slots.release()
            raise
        self._lent.add(sandbox)
        return sandbox

    async def release(self, sandbox: NamespaceSandbox) -> None:
        """Take a box back.

        Everything that runs in it is ended. A lost box is replaced at a later lease.
        """
        if sandbox not in self._lent:
            raise SandboxError(
                f"pool of {self.repository.name}: this box was not lent or was given back before"
            )
        self._lent.discard(sandbox)
        try:
            await sandbox.reset()
            self._free.append(sandbox)
        except SandboxError:
            await sandbox.close()
        finally:
            self._slots.release()

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
        boxes = [*self._free, *self._lent]
        self._free.clear()
        self._lent.clear()
        for sandbox in boxes:
            await sandbox.close()

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
