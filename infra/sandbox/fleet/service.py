"""The scheduler on the real clock, with real nodes."""

import asyncio
import logging
import random
import time
from collections.abc import Coroutine, Iterable
from typing import Any

from ostinato.infra.platform.errors import (
    CapacityExhausted,
    ClusterError,
    SandboxError,
    SandboxLost,
)
from ostinato.infra.platform.telemetry import fields
from ostinato.infra.sandbox.fleet.node import Node
from ostinato.infra.sandbox.fleet.records import (
    BoxRequest,
    FleetPolicy,
    Granted,
    NodeSpec,
    Notice,
    Order,
    Refused,
    StopBox,
    Template,
)
from ostinato.infra.sandbox.fleet.scheduler import FleetScheduler

_logger = logging.getLogger(__name__)

_FAILURES = (SandboxError, ClusterError)
_TICK_SECONDS = 0.02


class FleetService:
    """A fleet that runs: carries the scheduler's orders to nodes and their answers back, asks nodes
    for reports, and wakes whoever waits for a box. Belongs to one event loop.
    """

    def __init__(self, templates: Iterable[Template], policy: FleetPolicy) -> None:
        self.scheduler = FleetScheduler(templates, policy)
        self._heartbeat_seconds = policy.heartbeat_seconds
        self._rng = random.Random(0)
        self._nodes: dict[str, Node] = {}
        self._waiting: dict[str, asyncio.Future[Granted]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Begin to tick."""
        self._keep(self._tick())

    async def add_node(self, spec: NodeSpec, node: Node) -> None:
        """Take a node in once it has answered. It is asked for reports from then on."""
        self._nodes[spec.node_id] = node
        report = await node.report(time.monotonic())  # it may have just begun to start
        self.scheduler.join(spec, time.monotonic())
        self.scheduler.report(report, time.monotonic())
        self._collect()
        self._keep(self._watch(spec, node))

    async def acquire(self, request: BoxRequest) -> Granted:
        """The box of a request, when it is up. CapacityExhausted when the wait was over, or every
        start failed.
        """
        self.scheduler.ask(request, time.monotonic())
        future = self._waiting[request.request_id] = asyncio.get_running_loop().create_future()
        self.scheduler.place(time.monotonic(), self._rng)
        self._collect()
        try:
            return await future
        except asyncio.CancelledError:
            self.release(request.request_id)  # who asked gave up
            raise

    def renew(self, request_ids: Iterable[str]) -> list[str]:
        """Keep leases alive. The ids of those that are over."""
        now_seconds = time.monotonic()
        return [name for name in request_ids if not self.scheduler.renew(name, now_seconds)]

    def release(self, request_id: str) -> None:
        """Give a box back. Nothing happens when the lease is over."""
        self.scheduler.release(request_id, time.monotonic())
        self._refuse(request_id, SandboxLost(f"request {request_id} was withdrawn"))
        self._collect()

    async def close(self) -> None:
        """Stop deciding. Boxes are the nodes' to end."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for request_id in list(self._waiting):
            self._refuse(request_id, SandboxLost("the fleet was closed"))

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tick(self) -> None:
        while True:
            self.scheduler.tick(time.monotonic(), self._rng)
            self._collect()
            await asyncio.sleep(_TICK_SECONDS)

    async def _watch(self, spec: NodeSpec, node: Node) -> None:
        """Ask a node for reports until another takes its name."""
        while self._nodes.get(spec.node_id) is node:
            asked_at_seconds = time.monotonic()
            try:
                async with asyncio.timeout(self._heartbeat_seconds * 5):
                    report = await node.report(asked_at_seconds)
            except (*_FAILURES, TimeoutError) as error:
                _logger.info("node is silent %s", fields(node=spec.node_id, error=str(error)))
            else:
                if not self.scheduler.report(report, time.monotonic()):
                    self.scheduler.join(spec, time.monotonic())
                self._collect()
            await asyncio.sleep(self._heartbeat_seconds)

    def _collect(self) -> None:
        for notice in self.scheduler.take_notices():
            self._tell(notice)
        for order in self.scheduler.take_orders():
            self._keep(self._carry_out(order))

    async def _carry_out(self, order: Order) -> None:
        node = self._nodes.get(order.node_id)
        if node is None:
            return
        try:
            is_done = await node.obey(order)
        except _FAILURES as error:
            # the box may be there or not: the next report tells, or the start's deadline
            _logger.info("order unanswered %s", fields(order=str(order), error=str(error)))
            return
        if isinstance(order, StopBox):
            self.scheduler.box_stopped(order.box_id)
        elif is_done:
            self.scheduler.box_up(order.box_id, time.monotonic())
        else:
            self.scheduler.box_failed(order.box_id)
        self._collect()

    def _tell(self, notice: Notice) -> None:
        request_id = notice.request_id
        if isinstance(notice, Granted):
            future = self._waiting.pop(request_id)
            if not future.done():
                future.set_result(notice)
        elif isinstance(notice, Refused):
            waiting = len(self.scheduler.queue)
            why = f"request {request_id} got no box: {notice.reason}; {waiting} requests wait"
            self._refuse(request_id, CapacityExhausted(why))
        else:
            why = "not renewed in time" if notice.was_expired else "its box was lost"
            _logger.info("lease ended %s", fields(lease=request_id, why=why))

    def _refuse(self, request_id: str, error: SandboxError) -> None:
        future = self._waiting.pop(request_id, None)
        if future is not None and not future.done():
            future.set_exception(error)
            future.exception()  # it may be that nobody waits
