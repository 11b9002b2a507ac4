"""The fleet on Ray: an actor per node with its boxes, and one that schedules.

Calls on boxes go from the holder to the node, past the fleet.
"""

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from ostinato.infra.platform.cluster.actors import get_or_create_actor
from ostinato.infra.platform.errors import ClusterError, OstinatoError
from ostinato.infra.sandbox.fleet.boxes import BoxMaker
from ostinato.infra.sandbox.fleet.node import NodeDaemon
from ostinato.infra.sandbox.fleet.policy import FleetPolicy
from ostinato.infra.sandbox.fleet.pressure import read_pressure
from ostinato.infra.sandbox.fleet.records import (
    BoxRequest,
    Granted,
    NodeReport,
    NodeSpec,
    Order,
    Template,
)
from ostinato.infra.sandbox.fleet.service import FleetService

_MAX_CONCURRENCY = 10_000  # coroutines of one actor: who waits costs nothing
_FENCE_SECONDS = 30.0


class SandboxNodeActor(NodeDaemon):
    """A node's boxes in a process of their own: when it dies, they die with it."""

    def __init__(self, spec: NodeSpec, make_boxes: Callable[[], BoxMaker], writable: Path) -> None:
        super().__init__(spec, make_boxes(), lambda: read_pressure(writable))
        self._fence: asyncio.Task[None] | None = None

    async def report(self, counted_at_seconds: float) -> NodeReport:
        """As NodeDaemon.report. From the first one on the fleet must not fall silent."""
        if self._fence is None:
            self._fence = asyncio.create_task(self.fence(_FENCE_SECONDS))
        return await super().report(counted_at_seconds)

    async def process_id(self) -> int:
        """The process whose end is the end of its boxes."""
        return os.getpid()


class RemoteNode:
    """A `Node` in another process. Ray's errors come as ClusterError, the node's own as they are."""

    def __init__(self, handle: ActorHandle) -> None:
        self.handle = handle

    async def obey(self, order: Order) -> bool:
        return await ask(self.handle.obey.remote(order), f"order to {order.node_id}")

    async def report(self, counted_at_seconds: float) -> NodeReport:
        return await ask(self.handle.report.remote(counted_at_seconds), "report of a node")

    async def call(self, box_id: str, operation: str, *arguments: Any, **named: Any) -> Any:
        reference = self.handle.call.remote(box_id, operation, *arguments, **named)
        return await ask(reference, f"{operation} in {box_id}")


class FleetActor:
    """The fleet's service, and the leases of all holders."""

    def __init__(
        self,
        templates: tuple[Template, ...],
        policy: FleetPolicy,
        nodes: Mapping[str, tuple[NodeSpec, ActorHandle]],
        heartbeat_seconds: float,
    ) -> None:
        self._service = FleetService(templates, policy, heartbeat_seconds=heartbeat_seconds)
        self._nodes = dict(nodes)
        self._is_started = False

    async def start(self) -> None:
        """Begin to serve. A fleet that was found, not made, does already."""
        if self._is_started:
            return
        self._is_started = True
        await self._service.start()
        for spec, handle in self._nodes.values():
            await self._service.add_node(spec, RemoteNode(handle))

    async def acquire(self, request: BoxRequest) -> tuple[Granted, ActorHandle]:
        """The grant and the node to call. See FleetService.acquire."""
        grant = await self._service.acquire(request)
        return grant, self._nodes[grant.node_id][1]

    async def renew(self, request_ids: list[str]) -> list[str]:
        """Ids of those that are over."""
        return self._service.renew(request_ids)

    async def release(self, request_id: str) -> None:
        """Give a box back."""
        self._service.release(request_id)

    async def count(self) -> dict[str, int]:
        """Live leases, waiting requests, boxes and nodes."""
        scheduler = self._service.scheduler
        return {
            "leases": len(scheduler.leases),
            "waiting": len(scheduler.queue),
            "boxes": len(scheduler.view.boxes),
            "nodes": len(scheduler.view.nodes),
        }


async def ask(reference: Any, what: str) -> Any:
    """The value of a call on an actor. The call's own typed error passes."""
    try:
        return await reference
    except RayTaskError as error:
        if isinstance(error.cause, OstinatoError):
            raise error.cause from error
        raise
    except RayError as error:
        raise ClusterError(f"{what} failed: {type(error).__name__}: {error}") from error


async def start_fleet(
    name: str,
    templates: Iterable[Template],
    nodes: Iterable[NodeSpec],
    make_boxes: Callable[[], BoxMaker],
    *,
    writable: Path,
    policy: FleetPolicy | None = None,
    heartbeat_seconds: float = 2.0,
    machines: Mapping[str, str] | None = None,
) -> ActorHandle:
    """Start (or find) a fleet and its nodes. A node whose process dies is started again, empty.
    `machines`: Ray's id of the machine by node id; None: Ray chooses.
    """
    handles = {
        spec.node_id: (
            spec,
            get_or_create_actor(
                SandboxNodeActor,
                f"{name}-{spec.node_id}",
                spec,
                make_boxes,
                writable,
                max_concurrency=_MAX_CONCURRENCY,
                max_restarts=-1,
                on_node=None if machines is None else machines[spec.node_id],
            ),
        )
        for spec in nodes
    }
    fleet = get_or_create_actor(
        FleetActor,
        name,
        tuple(templates),
        policy or FleetPolicy(),
        handles,
        heartbeat_seconds,
        max_concurrency=_MAX_CONCURRENCY,
    )
    await ask(fleet.start.remote(), f"start of fleet {name}")
    return fleet
