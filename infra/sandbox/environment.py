"""Environment for attempts on one repository: boxes to work in and a test server."""

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from ostinato.infra.platform.errors import CapacityExhausted, SandboxNotFound
from ostinato.infra.sandbox.backends import open_backend
from ostinato.infra.sandbox.egress.door import Door
from ostinato.infra.sandbox.inside.sources import read_import_roots
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

    Every lease is a new box, so one attempt leaves nothing for the next. Boxes that begin with the same
    files (attempts of a group) are forks of one snapshot.
    """

    def __init__(
        self,
        repository: PreparedRepository,
        backend: SandboxBackend,
        boxes: int,
        *,
        limits: SandboxLimits | None = None,
        test_limits: SandboxLimits | None = None,
        mounts: Mapping[str, Path] | None = None,
        owns_backend: bool = False,
        tests_may_write: bool = False,
    ) -> None:
        """At most `boxes` are leased at a time. Nothing starts before it is needed.

        `mounts`: further host folders and sockets that boxes see. `owns_backend`: `close` also closes the
        backend; otherwise several repositories may share it. `tests_may_write`: as for TestServer.
        """
        self.repository = repository
        self.test_server = TestServer(repository, test_limits, tests_may_write=tests_may_write)
        self._backend = backend
        self._owns_backend = owns_backend
        self._limits = limits or SandboxLimits()
        self._mounts = mounts or {}
        self._num_boxes = boxes
        self._slots = asyncio.Semaphore(boxes)
        self._leased: set[str] = set()
        self._starts: OrderedDict[str, asyncio.Task[Snapshot]] = OrderedDict()
        self._starting: Counter[str] = Counter()

    @classmethod
    def create(
        cls,
        repository: PreparedRepository,
        boxes: int,
        kind: SandboxKind = SandboxKind.NAMESPACE,
        *,
        tests_may_write: bool = False,
    ) -> "RepositoryEnvironment":
        """An environment that owns its backend."""
        backend = open_backend(kind)
        return cls(repository, backend, boxes, owns_backend=True, tests_may_write=tests_may_write)

    async def lease(
        self,
        files: Mapping[str, bytes | None] | None = None,
        wait_seconds: float = _WAIT_SECONDS,
        door: Door | None = None,
    ) -> Sandbox:
        """A new box with `files` written over the pristine repository (None: removed). `door`: its network; None: it
        has none.

        Raises CapacityExhausted when no box became free within `wait_seconds`.
        """
        try:
            async with asyncio.timeout(wait_seconds):
                await self._slots.acquire()
        except TimeoutError as error:
            raise CapacityExhausted(
                f"repository {self.repository.name}: none of {self._num_boxes} boxes became free "
                f"within {wait_seconds} s"
            ) from error
        try:
            if door is None:
                sandbox = await self._start(files or {})
            else:  # the socket is this lease's alone, so it is in no snapshot
                sandbox = await self._backend.create(self._spec(files or {}, door))
        except BaseException:
            self._slots.release()
            raise
        self._leased.add(sandbox.sandbox_id)
        return sandbox

    async def release(self, sandbox: Sandbox) -> None:
        """Ends a leased box. A failure to end it is logged, not raised, because the caller cannot act on it."""
        if sandbox.sandbox_id not in self._leased:
            raise SandboxNotFound(
                f"repository {self.repository.name}: box {sandbox.sandbox_id} is not leased, "
                "or was released before"
            )
        self._leased.discard(sandbox.sandbox_id)
        self._slots.release()
        try:
            await sandbox.close()
        except Exception:
            logger.exception("box %s did not close cleanly", sandbox.sandbox_id)

    @asynccontextmanager
    async def leased(
        self, files: Mapping[str, bytes | None] | None = None
    ) -> AsyncIterator[Sandbox]:
        """A new box for the duration of a `with` block."""
        sandbox = await self.lease(files)
        try:
            yield sandbox
        finally:
            await self.release(sandbox)

    async def close(self) -> None:
        """Ends the test server, and the backend with all its boxes if this environment owns it."""
        for start in self._starts.values():
            start.cancel()
        await self.test_server.close()
        if self._owns_backend:
            await self._backend.close()

    async def _start(self, files: Mapping[str, bytes | None]) -> Sandbox:
        key = fingerprint_files(files)
        self._starting[key] += 1
        try:
            start = self._starts.get(key)
            if start is None or start.cancelled():
                self._starts[key] = asyncio.create_task(self._prepare(files))
            self._starts.move_to_end(key)
            snapshot = await asyncio.shield(self._starts[key])
            (sandbox,) = await self._backend.fork(snapshot)
        except Exception:  # also untyped errors such as OSError: the next lease tries again
            self._starts.pop(key, None)
            raise
        finally:
            self._starting[key] -= 1
        await self._drop_old_starts()
        return sandbox

    async def _prepare(self, files: Mapping[str, bytes | None]) -> Snapshot:
        """A snapshot of a box with these files, including its processes if the backend keeps memory."""
        has_memory = self._backend.keeps_memory
        sandbox = await self._backend.create(self._spec(files))
        try:
            return await sandbox.snapshot(SnapshotKind.MEMORY if has_memory else SnapshotKind.FILES)
        finally:
            await sandbox.close()

    def _spec(self, files: Mapping[str, bytes | None], door: Door | None = None) -> SandboxSpec:
        return SandboxSpec(
            repository=self.repository.directory,
            files=files,
            mounts=self._mounts if door is None else {**self._mounts, **door.mounts},
            import_roots=read_import_roots(self.repository.collection_rules),
            variables={} if door is None else door.variables,
            limits=self._limits,
        )

    async def _drop_old_starts(self) -> None:
        # a start whose leases were all cancelled may still run
        unused = [
            key for key, start in self._starts.items() if start.done() and not self._starting[key]
        ]
        for key in unused[: max(0, len(self._starts) - _KEPT_STARTS)]:
            start = self._starts.pop(key)
            del self._starting[key]
            if not start.cancelled() and start.exception() is None:
                await self._backend.remove_snapshot(start.result())


@asynccontextmanager
async def open_box(
    repository: PreparedRepository,
    files: Mapping[str, bytes | None] | None = None,
    limits: SandboxLimits | None = None,
) -> AsyncIterator[Sandbox]:
    """A namespace box with `files` written over a repository, for the duration of a `with` block."""
    backend = open_backend()
    try:
        yield await backend.create(
            SandboxSpec(
                repository=repository.directory, files=files or {}, limits=limits or SandboxLimits()
            )
        )
    finally:
        await backend.close()
