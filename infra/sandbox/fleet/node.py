"""The daemon of one node: obeys orders, tells what it has and feels, and passes calls on to boxes.

It decides nothing: which boxes there should be is the scheduler's. When the scheduler is silent for
too long it ends its boxes, so that a lost fleet leaves none behind.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol

from ostinato.infra.platform.errors import SandboxError, SandboxLost
from ostinato.infra.platform.telemetry import fields
from ostinato.infra.sandbox.fleet.boxes import BoxMaker, FleetBox, SavedState
from ostinato.infra.sandbox.fleet.records import (
    CleanBox,
    NodeReport,
    NodeSpec,
    Order,
    Pressure,
    StartBox,
    StopBox,
)

_logger = logging.getLogger(__name__)

# what a holder may call on its box: all that a sandbox offers, but its end
BOX_OPERATIONS = frozenset(
    (
        *("exec", "read", "write", "list", "diff", "reset", "stats"),
        *("open_session", "run_in_session", "signal_session", "close_session"),
        *("start_job", "read_job_logs", "wait_job", "kill_job"),
        *("read_files", "write_files", "list_files", "stat", "remove"),
    )
)


class Node(Protocol):
    """A node as the service talks to it, in this process or another."""

    async def obey(self, order: Order, source: Any | None = None) -> bool: ...

    async def report(self, counted_at_seconds: float) -> NodeReport: ...

    async def save_state(self, box_id: str, state_id: str) -> None: ...

    async def drop_state(self, state_id: str) -> None: ...

    async def call(self, box_id: str, operation: str, *arguments: Any, **named: Any) -> Any: ...


class NodeDaemon:
    """A `Node` that has its boxes in this process. Belongs to one event loop."""

    def __init__(
        self, spec: NodeSpec, boxes: BoxMaker, read_pressure: Callable[[], Pressure]
    ) -> None:
        self.spec = spec
        self._maker = boxes
        self._read_pressure = read_pressure
        self._boxes: dict[str, tuple[str, FleetBox]] = {}  # box id -> template, box
        self._starting: dict[str, asyncio.Task[bool]] = {}
        self._num_reports = 0

    async def obey(self, order: Order, source: "NodeDaemon | None" = None) -> bool:
        """Carry out an order; whether the box is then as wanted. Done again it does no harm.

        `source` is the node to copy a state from when the order names one.
        """
        if isinstance(order, StopBox):
            await self._stop(order.box_id)
            return True
        if isinstance(order, CleanBox):
            return await self._clean(order.box_id)
        if order.box_id in self._boxes:
            return True
        task = self._starting.get(order.box_id)
        if task is None:
            task = asyncio.create_task(self._start(order, source))
            self._starting[order.box_id] = task
            task.add_done_callback(lambda _: self._starting.pop(order.box_id, None))
        await asyncio.wait([task])
        return not task.cancelled() and task.result()

    async def report(self, counted_at_seconds: float) -> NodeReport:
        """Pressure and every box that is here; a box that died is not."""
        self._num_reports += 1
        for box_id in [box_id for box_id, (_, box) in self._boxes.items() if box.is_lost]:
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
        return await getattr(self._find(box_id)[1], operation)(*arguments, **named)

    async def save_state(self, box_id: str, state_id: str) -> None:
        """Keep what the box holds now, to be forked here or given to another node."""
        template, box = self._find(box_id)
        await self._maker.save(state_id, template, box)

    async def give_state(self, state_id: str) -> SavedState:
        """A state for another node."""
        return await self._maker.give(state_id)

    def take_state(self, state_id: str, state: SavedState) -> None:
        """Keep a state that came from another node."""
        self._maker.take(state_id, state)

    async def drop_state(self, state_id: str) -> None:
        """Free a state; forks that run go on."""
        await self._maker.drop(state_id)

    @property
    def num_boxes(self) -> int:
        """Boxes that are up."""
        return len(self._boxes)

    async def fence(self, silence_seconds: float) -> None:
        """Watch the scheduler: when it has asked for no report for so long, end every box. Runs
        until cancelled.
        """
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

    async def _start(self, order: StartBox, source: "NodeDaemon | None") -> bool:
        try:
            if order.state_id is None:
                box = await self._maker.make(order.template)
            else:
                if source is not None and not self._maker.has_state(order.state_id):
                    self.take_state(order.state_id, await source.give_state(order.state_id))
                box = await self._maker.fork(order.state_id)
        except SandboxError as error:
            _logger.warning(
                "box did not start %s",
                fields(node=self.spec.node_id, box=order.box_id, error=str(error)),
            )
            return False
        self._boxes[order.box_id] = (order.template, box)
        return True

    async def _clean(self, box_id: str) -> bool:
        try:
            template, box = self._find(box_id)
            self._boxes[box_id] = (template, await self._maker.clean(template, box))
        except SandboxError:
            await self._stop(box_id)
            return False
        return True

    async def _stop(self, box_id: str) -> None:
        task = self._starting.get(box_id)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        entry = self._boxes.pop(box_id, None)
        if entry is not None:
            await entry[1].close()

    def _find(self, box_id: str) -> tuple[str, FleetBox]:
        entry = self._boxes.get(box_id)
        if entry is None:
            raise SandboxLost(f"box {box_id} is not on node {self.spec.node_id}")
        return entry
