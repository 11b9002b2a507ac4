"""Environment of the attempts on one repository: boxes to work in, and a test server."""

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from ostinato.infra.platform.errors import CapacityExhausted, SandboxNotFound
from ostinato.infra.sandbox.backends import open_backend
from ostinato.infra.sandbox.protocol import (
    Sandbox,
    SandboxBackend,
    SandboxKind,
    SandboxLimits,
    SandboxSpec,
    Snapshot,
    SnapshotKind,
)
from ostinato.infra.sandbox.repository import PreparedRepository, fingerprint_files
from ostinato.infra.sandbox.test_server import TestServer

logger = logging.getLogger(__name__)
_KEPT_STARTS = 8
_WAIT_SECONDS = 120.0


class RepositoryEnvironment:
    """Sandboxes and the test server of one repository. Belongs to one event loop.

    Every lease is a new box, so nothing of an attempt is left for the next. Those that begin with the
    same files (attempts of a group) are forks of one snapshot.
    """

    def __init__(
        self,
        repository: PreparedRepository,
        backend: SandboxBackend,
        boxes: int,
        *,
        limits: SandboxLimits | None = None,
        test_limits: SandboxLimits | None = None,
        owns_backend: bool = False,
    ) -> None:
        """At most `boxes` are leased at a time. Nothing starts before it is needed.

        `owns_backend`: `close` ends the backend too. Else several repositories may share it.
        """
        self.repository = repository
        self.test_server = TestServer(repository, test_limits)
        self._backend = backend
        self._owns_backend = owns_backend
        self._limits = limits or SandboxLimits()
        self._num_boxes = boxes
        self._slots = asyncio.Semaphore(boxes)
        self._leased: set[str] = set()
        self._starts: OrderedDict[str, asyncio.Task[Snapshot]] = OrderedDict()
        self._starting: Counter[str] = Counter()

    @classmethod
    def create(
        cls, repository: PreparedRepository, boxes: int, kind: SandboxKind = SandboxKind.NAMESPACE
    ) -> "RepositoryEnvironment":
        """An environment with a backend of its own."""
        return cls(repository, open_backend(kind), boxes, owns_backend=True)

    async def lease(
        self,
        files: Mapping[str, bytes | None] | None = None,
        wait_seconds: float = _WAIT_SECONDS,
    ) -> Sandbox:
        """A new box with `files` laid over the pristine repository (None: removed).

        CapacityExhausted when none came free within `wait_seconds`.
        """
        try:
            async with asyncio.timeout(wait_seconds):
                await self._slots.acquire()
        except TimeoutError as error:
            raise CapacityExhausted(
                f"repository {self.repository.name}: none of {self._num_boxes} boxes came free "
                f"in {wait_seconds} s"
            ) from error
        try:
            sandbox = await self._start(files or {})
        except BaseException:
            self._slots.release()
            raise
        self._leased.add(sandbox.sandbox_id)
        return sandbox

    async def release(self, sandbox: Sandbox) -> None:
        """End a leased box. Its end raises nothing: who used it has no part in that."""
        if sandbox.sandbox_id not in self._leased:
            raise SandboxNotFound(
                f"repository {self.repository.name}: box {sandbox.sandbox_id} is not leased, "
                "or was given back before"
            )
        self._leased.discard(sandbox.sandbox_id)
        self._slots.release()
        try:
            await sandbox.close()
        except Exception:
            logger.exception("box %s has not ended as it should", sandbox.sandbox_id)

    @asynccontextmanager
    async def leased(
        self, files: Mapping[str, bytes | None] | None = None
    ) -> AsyncIterator[Sandbox]:
        """A new box for the length of a block."""
        sandbox = await self.lease(files)
        try:
            yield sandbox
        finally:
            await self.release(sandbox)

    async def close(self) -> None:
        """End the test server, and all boxes where the backend is this environment's own."""
        for start in self._starts.values():
            start.cancel()
        await self.test_server.close()
        if self._owns_backend:
            await self._backend.close()

    async def _start(self, files: Mapping[str, bytes | None]) -> Sandbox:
        key = fingerprint_files(files)
        self._starting[key] += 1
        try:
            if key not in self._starts:
                self._starts[key] = asyncio.create_task(self._prepare(files))
            self._starts.move_to_end(key)
            snapshot = await asyncio.shield(self._starts[key])
            (sandbox,) = await self._backend.fork(snapshot)
        except Exception:  # OSError and the like too: the next lease tries again
            self._starts.pop(key, None)
            raise
        finally:
            self._starting[key] -= 1
        await self._drop_old_starts()
        return sandbox

    async def _prepare(self, files: Mapping[str, bytes | None]) -> Snapshot:
        """The state of a box with these files, its processes included where the backend keeps them."""
        has_memory = self._backend.keeps_memory
        sandbox = await self._backend.create(
            SandboxSpec(repository=self.repository.directory, files=files, limits=self._limits)
        )
        try:
            return await sandbox.snapshot(SnapshotKind.MEMORY if has_memory else SnapshotKind.FILES)
        finally:
            await sandbox.close()

    async def _drop_old_starts(self) -> None:
        # a start that all its leases gave up may still run
        unused = [
            key for key, start in self._starts.items() if start.done() and not self._starting[key]
        ]
        for key in unused[: max(0, len(self._starts) - _KEPT_STARTS)]:
            start = self._starts.pop(key)
            del self._starting[key]
            if start.exception() is None:
                await self._backend.remove_snapshot(start.result())


@asynccontextmanager
async def open_box(
    repository: PreparedRepository,
    files: Mapping[str, bytes | None] | None = None,
    limits: SandboxLimits | None = None,
) -> AsyncIterator[Sandbox]:
    """One namespace box with `files` laid over a repository, for the length of a block."""
    backend = open_backend()
    try:
        yield await backend.create(
            SandboxSpec(
                repository=repository.directory, files=files or {}, limits=limits or SandboxLimits()
            )
        )
    finally:
        await backend.close()
