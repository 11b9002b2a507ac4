"""The daemon of one node: obeys orders, tells what it has and feels, and passes calls on to boxes.

It decides nothing: which boxes there should be is the scheduler's.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from ostinato.infra.platform.errors import SandboxError, SandboxLost
from ostinato.infra.platform.telemetry import fields
from ostinato.infra.sandbox.backends import SandboxKind, open_backend
from ostinato.infra.sandbox.fleet.records import (
    NodeReport,
    NodeSpec,
    Order,
    Pressure,
    StartBox,
    StopBox,
)
from ostinato.infra.sandbox.protocol import Sandbox, SandboxLimits, SandboxSpec
from ostinato.infra.sandbox.repository import PreparedRepository

_logger = logging.getLogger(__name__)

# what a holder may call on its box: all that a sandbox offers, but its end
BOX_OPERATIONS = frozenset(("request", "diff"))


class Node(Protocol):
    """A node as the service talks to it, in this process or another."""

    async def obey(self, order: Order) -> bool: ...

    async def report(self, counted_at_seconds: float) -> NodeReport: ...

    async def call(self, box_id: str, operation: str, *arguments: Any, **named: Any) -> Any: ...


class RepositoryBoxes:
    """Boxes of this machine whose templates are repositories. Belongs to one event loop."""

    def __init__(
        self,
        repositories: Mapping[str, PreparedRepository],
        limits: SandboxLimits | None = None,
        kind: SandboxKind = SandboxKind.NAMESPACE,
    ) -> None:
        self._repositories = dict(repositories)
        self._limits = limits or SandboxLimits()
        self._backend = open_backend(kind)

    async def __call__(self, template: str) -> Sandbox:
        repository = self._repositories.get(template)
        if repository is None:
            names = ", ".join(sorted(self._repositories)) or "none"
            raise SandboxError(f"template {template} is not on this node; wanted one of: {names}")
        return await self._backend.create(
            SandboxSpec(repository=repository.directory, limits=self._limits)
        )


class NodeDaemon:
    """A `Node` that has its boxes in this process. Belongs to one event loop."""

    def __init__(
        self,
        spec: NodeSpec,
        make_box: Callable[[str], Awaitable[Sandbox]],
        read_pressure: Callable[[], Pressure],
    ) -> None:
        """`make_box`: a box in its template's state, that answers."""
        self.spec = spec
        self._make_box = make_box
        self._read_pressure = read_pressure
        self._boxes: dict[str, Sandbox] = {}  # by box id
        self._starting: dict[str, asyncio.Task[bool]] = {}
        self._num_reports = 0

    async def obey(self, order: Order) -> bool:
        """Carry out an order; whether the box is then as wanted. Done again it does no harm."""
        if isinstance(order, StopBox):
            await self._stop(order.box_id)
            return True
        if order.box_id in self._boxes:
            return True
        task = self._starting.get(order.box_id)
        if task is None:
            task = asyncio.create_task(self._start(order))
            self._starting[order.box_id] = task
            task.add_done_callback(lambda _: self._starting.pop(order.box_id, None))
        await asyncio.wait([task])
        return not task.cancelled() and task.result()

    async def report(self, counted_at_seconds: float) -> NodeReport:
        """Pressure and every box that is here; a box that died is not."""
        self._num_reports += 1
        for box_id in [box_id for box_id, box in self._boxes.items() if box.is_lost]:
            await self._stop(box_id)
        return NodeReport(
            node_id=self.spec.node_id,
            pressure=self._read_pressure(),
            boxes=frozenset((*self._boxes, *self._starting)),
            counted_at_seconds=counted_at_seconds,
        )

    async def call(self, box_id: str, operation: str, *arguments: Any, **named: Any) -> Any:
        """Pass an operation on to a box. SandboxLost when it is not here."""
        if operation not in BOX_OPERATIONS:
            raise SandboxError(
                f"{operation} on box {box_id}: wanted one of {', '.join(sorted(BOX_OPERATIONS))}"
            )
        box = self._boxes.get(box_id)
        if box is None:
            raise SandboxLost(f"box {box_id} is not on node {self.spec.node_id}")
        return await getattr(box, operation)(*arguments, **named)

    @property
    def num_boxes(self) -> int:
        """Boxes that are up."""
        return len(self._boxes)

    async def fence(self, silence_seconds: float) -> None:
        """Ends every box when the scheduler has been silent too long. Runs until cancelled."""
        while True:
            seen = self._num_reports
            await asyncio.sleep(silence_seconds)
            if seen == self._num_reports and (self._boxes or self._starting):
                _logger.warning(
                    "fleet is silent, boxes ended %s",
                    fields(node=self.spec.node_id, boxes=self.num_boxes, seconds=silence_seconds),
                )
                await self.close()

    async def close(self) -> None:
        """End every box."""
        for box_id in (*self._starting, *self._boxes):
            await self._stop(box_id)

    async def _start(self, order: StartBox) -> bool:
        try:
            self._boxes[order.box_id] = await self._make_box(order.template)
        except SandboxError as error:
            _logger.warning(
                "box did not start %s",
                fields(node=self.spec.node_id, box=order.box_id, error=str(error)),
            )
            return False
        return True

    async def _stop(self, box_id: str) -> None:
        task = self._starting.get(box_id)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        box = self._boxes.pop(box_id, None)
        if box is not None:
            await box.close()
