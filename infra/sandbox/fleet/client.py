"""A holder's side of a fleet on Ray.

A holder that dies stops renewing its leases, and its boxes go back by themselves.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import ray
from ray.actor import ActorHandle

from ostinato.infra.platform.cluster.actors import find_actor
from ostinato.infra.platform.errors import (
    ClusterError,
    InvalidArgument,
    SandboxError,
    SandboxLost,
)
from ostinato.infra.platform.telemetry import fields
from ostinato.infra.sandbox.fleet.actor import RemoteNode, ask
from ostinato.infra.sandbox.fleet.records import BoxRequest, Granted, Priority
from ostinato.infra.sandbox.protocol import ExecResult, Snapshot, SnapshotKind
from ostinato.infra.sandbox.repository import PreparedRepository

_logger = logging.getLogger(__name__)

_RENEWALS_PER_LEASE = 3


class LeasedBox:
    """A box on some node. After SandboxLost it is over."""

    def __init__(
        self,
        request_id: str,
        grant: Granted,
        node: RemoteNode,
        give_back: Callable[["LeasedBox"], Awaitable[None]],
    ) -> None:
        self.request_id = request_id
        self.box_id = grant.box_id
        self.node_id = grant.node_id
        self.is_lost = False
        self._node = node
        self._give_back = give_back

    @property
    def sandbox_id(self) -> str:
        """The box's id in its fleet."""
        return self.box_id

    async def exec(
        self,
        command: str,
        timeout_seconds: float,
        output_cap_bytes: int = 16_384,
        *,
        stdin: bytes = b"",
    ) -> ExecResult:
        """Run a shell command in the repository."""
        return await self._call("exec", command, timeout_seconds, output_cap_bytes, stdin=stdin)

    async def read(self, path: str) -> bytes:
        """Content of a file."""
        return await self._call("read", path)

    async def write(self, path: str, content: bytes) -> None:
        """Replace a file."""
        await self._call("write", path, content)

    async def list(self, path: str = ".") -> tuple[str, ...]:
        """Names in a folder."""
        return await self._call("list", path)

    async def diff(self, base: Snapshot | None = None) -> dict[str, bytes | None]:
        """Files that differ from `base` (None: the template). None: removed."""
        return await self._call("diff", base)

    async def snapshot(self, kind: SnapshotKind = SnapshotKind.FILES) -> Snapshot:
        """Refused: a snapshot would stay on the box's node."""
        raise InvalidArgument(f"snapshot {kind} of {self.box_id}: a fleet keeps none")

    async def write_files(self, files: Mapping[str, bytes | None]) -> dict[str, SandboxError]:
        """Write and remove (None) files. The errors by path."""
        return await self._call("write_files", files)

    async def close(self) -> None:
        """Give the box back."""
        await self._give_back(self)

    async def _call(self, operation: str, *arguments: Any, **named: Any) -> Any:
        try:
            return await self._node.call(self.box_id, operation, *arguments, **named)
        except SandboxLost:
            self.is_lost = True
            raise
        except ClusterError as error:
            self.is_lost = True
            raise SandboxLost(f"box {self.box_id}: its node is gone: {error}") from error


class FleetClient:
    """Leases of one process on the boxes of one fleet, which is found by name when first asked.
    Belongs to one event loop.
    """

    def __init__(
        self,
        fleet_name: str,
        *,
        priority: Priority = Priority.TRAINING,
        lease_seconds: float = 60.0,
        wait_seconds: float = 120.0,
    ) -> None:
        self._fleet_name = fleet_name
        self._priority = priority
        self._lease_seconds = lease_seconds
        self._wait_seconds = wait_seconds
        self._live: dict[str, LeasedBox] = {}
        self._numbers = itertools.count(1)
        self._renewing: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def leased(
        self, repository: PreparedRepository, files: Mapping[str, bytes | None]
    ) -> AsyncIterator[LeasedBox]:
        """A clean box with `files` laid over the repository, for the length of a block.
        CapacityExhausted when none came free in time, SandboxLost when the fleet is gone.
        """
        box = await self.acquire(repository.name)
        try:
            await box.write_files(files)
            yield box
        finally:
            await self.release(box)

    async def acquire(self, template: str) -> LeasedBox:
        """A box of a template, to be given back with `release`."""
        # of this process alone: one started again must not be given the boxes of the one before
        holder_id = ray.get_runtime_context().get_worker_id()
        request = BoxRequest(
            request_id=f"{holder_id}/{next(self._numbers)}",
            template=template,
            holder_id=holder_id,
            priority=self._priority,
            lease_seconds=self._lease_seconds,
            wait_seconds=self._wait_seconds,
        )
        if self._renewing is None:
            self._renewing = asyncio.create_task(self._renew())
        try:
            reference = self._find().acquire.remote(request)
            grant, handle = await ask(reference, f"request {request.request_id}")
        except ClusterError as error:
            raise SandboxLost(f"fleet {self._fleet_name} gives no box: {error}") from error
        box = LeasedBox(request.request_id, grant, RemoteNode(handle), self.release)
        self._live[request.request_id] = box
        return box

    async def release(self, box: LeasedBox) -> None:
        """Give a box back. Where the fleet is gone the lease ends by itself."""
        self._live.pop(box.request_id, None)
        try:
            reference = self._find().release.remote(box.request_id)
            await ask(reference, f"lease {box.request_id}")
        except (ClusterError, SandboxLost) as error:
            _logger.info("box not given back %s", fields(box=box.box_id, error=str(error)))

    async def close(self) -> None:
        """Give everything back."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
        for box in list(self._live.values()):
            await self.release(box)

    def _find(self) -> ActorHandle:
        fleet = find_actor(self._fleet_name)
        if fleet is None:
            raise SandboxLost(f"fleet {self._fleet_name} is not registered, wanted a live one")
        return fleet

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._lease_seconds / _RENEWALS_PER_LEASE)
            try:
                reference = self._find().renew.remote(list(self._live))
                over = await ask(reference, "renewal of leases")
            except (ClusterError, SandboxLost) as error:  # it restarts or is slow: try again
                _logger.info("no renewal %s", fields(fleet=self._fleet_name, error=str(error)))
                continue
            for request_id in over:
                box = self._live.pop(request_id, None)
                if box is not None:
                    box.is_lost = True
