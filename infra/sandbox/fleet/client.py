"""A holder's side of a fleet on Ray.

`FleetClient` (asks for boxes and keeps its leases alive) and `LeasedBox` (a `Sandbox` whose
operations run on its node). A holder that dies stops renewing, and its boxes go back by themselves.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from ray.actor import ActorHandle

from ostinato.infra.platform.errors import CapacityExhausted, ClusterError, SandboxLost
from ostinato.infra.platform.telemetry import fields
from ostinato.infra.sandbox.fleet.actor import RemoteNode, ask
from ostinato.infra.sandbox.fleet.records import BoxRequest, Priority
from ostinato.infra.sandbox.protocol import ExecResult

_logger = logging.getLogger(__name__)

_RENEWALS_PER_LEASE = 3


class LeasedBox:
    """A box on some node. After SandboxLost it is over; a movable lease gets another, empty one,
    with `FleetClient.again`.
    """

    def __init__(
        self,
        request_id: str,
        box_id: str,
        node: RemoteNode,
        give_back: Callable[["LeasedBox"], Awaitable[None]],
    ) -> None:
        self.request_id = request_id
        self.box_id = box_id
        self.is_lost = False
        self._node = node
        self._give_back = give_back

    async def exec(
        self, command: str, timeout_seconds: float, output_cap_bytes: int = 16_384
    ) -> ExecResult:
        """Run a shell command in the repository."""
        return await self._call("exec", command, timeout_seconds, output_cap_bytes)

    async def read(self, path: str) -> bytes:
        """Content of a file."""
        return await self._call("read", path)

    async def write(self, path: str, content: bytes) -> None:
        """Replace a file."""
        await self._call("write", path, content)

    async def list(self, path: str = ".") -> tuple[str, ...]:
        """Names in a folder."""
        return await self._call("list", path)

    async def diff(self) -> dict[str, bytes | None]:
        """Files that differ from the template; None: removed."""
        return await self._call("diff")

    async def reset(self, files: Mapping[str, bytes | None] | None = None) -> None:
        """Back to the template with `files` laid over it; every process in the box ends."""
        await self._call("reset", files)

    async def close(self) -> None:
        """Give the box back."""
        await self._give_back(self)

    async def call(self, operation: str, *arguments: Any, **named: Any) -> Any:
        """Any operation of the node's kind of box, such as `run_in_session` or `write_files`."""
        return await self._call(operation, *arguments, **named)

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
    """Asks one fleet for boxes on behalf of one holder. Belongs to one event loop."""

    def __init__(self, fleet: ActorHandle, holder_id: str, *, lease_seconds: float = 60.0) -> None:
        self._fleet = fleet
        self._holder_id = holder_id
        self._lease_seconds = lease_seconds
        self._live: dict[str, LeasedBox] = {}
        self._numbers = itertools.count(1)
        self._renewing: asyncio.Task[None] | None = None

    async def acquire(
        self,
        template: str,
        priority: Priority = Priority.TRAINING,
        *,
        wait_seconds: float = 120.0,
        fork_of: str | None = None,
        is_movable: bool = True,
    ) -> LeasedBox:
        """A box of a template, or one that continues a saved state. CapacityExhausted when none
        could be had in time; ask again later.
        """
        request = BoxRequest(
            request_id=f"{self._holder_id}/{next(self._numbers)}",
            template=template,
            holder_id=self._holder_id,
            priority=priority,
            lease_seconds=self._lease_seconds,
            wait_seconds=wait_seconds,
            fork_of=fork_of,
            is_movable=is_movable,
        )
        if self._renewing is None:
            self._renewing = asyncio.create_task(self._renew())
        what = f"request {request.request_id}"
        grant, handle = await ask(self._fleet.acquire.remote(request), what)
        box = LeasedBox(request.request_id, grant.box_id, RemoteNode(handle), self.release)
        self._live[request.request_id] = box
        return box

    async def again(self, box: LeasedBox) -> LeasedBox:
        """The box that a lease got in place of a lost one. CapacityExhausted while it starts, or
        while the fleet has not seen the loss; SandboxLost when the lease is over.
        """
        what = f"lease {box.request_id}"
        grant, handle = await ask(self._fleet.where.remote(box.request_id), what)
        newest = self._live.get(box.request_id, box)
        if newest.is_lost and newest.box_id == grant.box_id:
            raise CapacityExhausted(f"{what}: box {grant.box_id} was lost and is not replaced yet")
        new_box = LeasedBox(box.request_id, grant.box_id, RemoteNode(handle), self.release)
        self._live[box.request_id] = new_box
        return new_box

    async def save_state(self, box: LeasedBox, state_id: str) -> None:
        """Save what a box holds under an id that `acquire` can fork."""
        await ask(self._fleet.save_state.remote(box.request_id, state_id), f"state {state_id}")

    async def release(self, box: LeasedBox) -> None:
        """Give a box back."""
        self._live.pop(box.request_id, None)
        await ask(self._fleet.release.remote(box.request_id), f"lease {box.request_id}")

    @asynccontextmanager
    async def leased(self, template: str, **options: Any) -> AsyncIterator[LeasedBox]:
        """A box for the length of a block."""
        box = await self.acquire(template, **options)
        try:
            yield box
        finally:
            await self.release(box)

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
                over = await ask(self._fleet.renew.remote(list(self._live)), "renewal of leases")
            except ClusterError as error:  # the fleet restarts or is slow: try again in time
                _logger.info("no renewal %s", fields(holder=self._holder_id, error=str(error)))
                continue
            for request_id in over:
                self._live.pop(request_id).is_lost = True
