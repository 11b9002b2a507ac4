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
    SandboxHostLost,
    SandboxLost,
)
from ostinato.infra.platform.telemetry import fields
from ostinato.infra.sandbox.fleet.actor import RemoteNode, ask, name_node
from ostinato.infra.sandbox.fleet.node import Node
from ostinato.infra.sandbox.fleet.records import BoxRequest, Granted
from ostinato.infra.sandbox.host.tools import Blobs, BoxTools, Reply
from ostinato.infra.sandbox.protocol import Snapshot, SnapshotKind
from ostinato.infra.sandbox.repository import PreparedRepository

_logger = logging.getLogger(__name__)

_RENEWALS_PER_LEASE = 3


class _NodeChannel:
    """Requests to a box through its node."""

    def __init__(self, grant: Granted, node: Node) -> None:
        self.name = grant.box_id
        self.is_lost = False
        self._node = node

    async def request(
        self, operation: str, answer_seconds: float, blobs: Blobs = (), **fields: Any
    ) -> Reply:
        return await self.call("request", operation, answer_seconds, blobs, **fields)

    async def call(self, operation: str, *arguments: Any, **named: Any) -> Any:
        if self.is_lost:
            raise SandboxHostLost(f"box {self.name}: its lease is over")
        try:
            return await self._node.call(self.name, operation, *arguments, **named)
        except SandboxLost:
            self.is_lost = True
            raise
        except ClusterError as error:
            self.is_lost = True
            raise SandboxHostLost(f"box {self.name}: its node is gone: {error}") from error


class LeasedBox(BoxTools):
    """A box on some node. After SandboxLost it is over."""

    def __init__(
        self, grant: Granted, node: Node, give_back: Callable[["LeasedBox"], Awaitable[None]]
    ) -> None:
        self._channel = _NodeChannel(grant, node)
        super().__init__(self._channel)
        self.request_id = grant.request_id
        self.sandbox_id = grant.box_id
        self.node_id = grant.node_id
        self._give_back = give_back

    async def diff(self, base: Snapshot | None = None) -> dict[str, bytes | None]:
        """Files that differ from the template. None: removed."""
        if base is not None:
            raise InvalidArgument(f"diff of {self.sandbox_id} from {base}: a fleet keeps none")
        return await self._channel.call("diff")

    async def snapshot(self, kind: SnapshotKind = SnapshotKind.FILES) -> Snapshot:
        """Refused: a snapshot would stay on the box's node."""
        raise InvalidArgument(f"snapshot {kind} of {self.sandbox_id}: a fleet keeps none")

    async def close(self) -> None:
        """Give the box back."""
        await self._give_back(self)

    def lose(self) -> None:
        """Note that the lease is over."""
        self._channel.is_lost = True


class FleetClient:
    """Leases of one process on the boxes of one fleet, which is found by name when first asked.
    Belongs to one event loop.
    """

    def __init__(
        self,
        fleet_name: str,
        *,
        lease_seconds: float = 60.0,
    ) -> None:
        self._fleet_name = fleet_name
        self._lease_seconds = lease_seconds
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
            lease_seconds=self._lease_seconds,
        )
        if self._renewing is None:
            self._renewing = asyncio.create_task(self._renew())
        try:
            reference = _find(self._fleet_name).acquire.remote(request)
            grant: Granted = await ask(reference, f"request {request.request_id}")
        except ClusterError as error:
            raise SandboxLost(f"fleet {self._fleet_name} gives no box: {error}") from error
        node = RemoteNode(_find(name_node(self._fleet_name, grant.node_id)))
        box = LeasedBox(grant, node, self.release)
        self._live[request.request_id] = box
        return box

    async def release(self, box: LeasedBox) -> None:
        """Give a box back. Where the fleet is gone the lease ends by itself."""
        self._live.pop(box.request_id, None)
        try:
            reference = _find(self._fleet_name).release.remote(box.request_id)
            await ask(reference, f"lease {box.request_id}")
        except (ClusterError, SandboxLost) as error:
            _logger.info("box not given back %s", fields(box=box.sandbox_id, error=str(error)))

    async def close(self) -> None:
        """Give everything back."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
        for box in list(self._live.values()):
            await self.release(box)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._lease_seconds / _RENEWALS_PER_LEASE)
            try:
                reference = _find(self._fleet_name).renew.remote(list(self._live))
                over = await ask(reference, "renewal of leases")
            except (ClusterError, SandboxLost) as error:  # it restarts or is slow: try again
                _logger.info("no renewal %s", fields(fleet=self._fleet_name, error=str(error)))
                continue
            for request_id in over:
                box = self._live.pop(request_id, None)
                if box is not None:
                    box.lose()


def _find(name: str) -> ActorHandle:
    actor = find_actor(name)
    if actor is None:
        raise SandboxLost(f"{name} is not registered, wanted a live sandbox fleet")
    return actor
