"""The fleet on Ray: an actor per node with its boxes, and one that schedules.

Calls on boxes go from the holder to the node, past the fleet.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from ostinato.infra.platform.errors import ClusterError, OstinatoError
from ostinato.infra.sandbox.fleet.node import NodeDaemon, RepositoryBoxes
from ostinato.infra.sandbox.fleet.pressure import read_pressure
from ostinato.infra.sandbox.fleet.records import (
    FleetPolicy,
    NodeReport,
    NodeSpec,
    Order,
    Template,
)
from ostinato.infra.sandbox.fleet.service import FleetService

_FENCE_SECONDS = 30.0


class SandboxNodeActor(NodeDaemon):
    """A node's boxes in a process of their own: when it dies, they die with it."""

    def __init__(
        self, spec: NodeSpec, make_boxes: Callable[[], RepositoryBoxes], writable: Path
    ) -> None:
        super().__init__(spec, make_boxes(), lambda: read_pressure(writable))
        self._fence: asyncio.Task[None] | None = None

    async def report(self, counted_at_seconds: float) -> NodeReport:
        """As NodeDaemon.report. From the first one on the fleet must not fall silent."""
        if self._fence is None:
            self._fence = asyncio.create_task(self.fence(_FENCE_SECONDS))
        return await super().report(counted_at_seconds)


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


class FleetActor(FleetService):
    """The fleet's service, and the leases of all holders."""

    def __init__(
        self,
        templates: tuple[Template, ...],
        policy: FleetPolicy,
        nodes: Sequence[tuple[NodeSpec, ActorHandle]],
    ) -> None:
        super().__init__(templates, policy)
        self._remote_nodes = nodes
        self._is_started = False

    async def start(self) -> None:
        """Begin to serve. A fleet that was found, not made, does already."""
        if self._is_started:
            return
        self._is_started = True
        await super().start()
        for spec, handle in self._remote_nodes:
            await self.add_node(spec, RemoteNode(handle))

    async def count(self) -> dict[str, int]:
        """Live leases, waiting requests, boxes and nodes."""
        return {
            "leases": len(self.scheduler.leases),
            "waiting": len(self.scheduler.queue),
            "boxes": len(self.scheduler.view.boxes),
            "nodes": len(self.scheduler.view.nodes),
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


def name_node(fleet_name: str, node_id: str) -> str:
    """Name of the actor of a fleet's node."""
    return f"{fleet_name}-{node_id}"
