"""The scheduler on the real clock, with real nodes.

`FleetService`: it gives the scheduler the time, carries its orders to nodes and their answers back,
asks nodes for reports, and wakes whoever waits for a box. It decides nothing itself. Belongs to one
event loop.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable

from ostinato.infra.platform.errors import (
    CapacityExhausted,
    ClusterError,
    SandboxError,
    SandboxLost,
)
from ostinato.infra.platform.telemetry import fields
from ostinato.infra.sandbox.fleet.node import Node
from ostinato.infra.sandbox.fleet.policy import FleetPolicy
from ostinato.infra.sandbox.fleet.records import (
    BoxRequest,
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


class FleetService:
    """A fleet that runs."""

    def __init__(
        self,
        templates: Iterable[Template],
        policy: FleetPolicy | None = None,
        *,
        tick_seconds: float = 0.02,
        heartbeat_seconds: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.scheduler = FleetScheduler(templates, policy)
        self._tick_seconds = tick_seconds
        self._heartbeat_seconds = heartbeat_seconds
        self._clock = clock
        self._rng = rng or random.Random(0)
        self._nodes: dict[str, Node] = {}
        self._waiting: dict[str, asyncio.Future[Granted]] = {}
        self._grants: dict[str, Granted] = {}  # of live leases, by request id
        self._tasks: set[asyncio.Task[None]] = set()
        self._loops: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to tick."""
        self._loops.append(asyncio.create_task(self._tick()))

    async def add_node(self, spec: NodeSpec, node: Node) -> None:
        """Take a node in once it has answered. It is asked for reports from then on."""
        self._nodes[spec.node_id] = node
        report = await node.report(self._clock())  # it may have just begun to start
        self.scheduler.join(spec, self._clock())
        self.scheduler.report(report, self._clock())
        self._collect()
        self._loops.append(asyncio.create_task(self._watch(spec, node)))

    async def acquire(self, request: BoxRequest) -> Granted:
        """The box of a request, when it is up.

        Asked again with the same id the answer is the same. CapacityExhausted when the line is
        full, the wait was over, or every start failed.
        """
        request_id = request.request_id
        grant = self._grants.get(request_id)
        if grant is not None:
            return grant
        future = self._waiting.get(request_id)
        if future is None:
            self.scheduler.ask(request, self._clock())
            future = asyncio.get_running_loop().create_future()
            self._waiting[request_id] = future
            self.scheduler.place(self._clock(), self._rng)
            self._collect()
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if not future.done():  # who asked gave up
                self.release(request_id)
            raise

    def renew(self, request_ids: Iterable[str]) -> list[str]:
        """Keep leases alive. The ids of those that are over."""
        now_seconds = self._clock()
        return [name for name in request_ids if not self.scheduler.renew(name, now_seconds)]

    def release(self, request_id: str) -> None:
        """Give a box back. Nothing happens when the lease is over."""
        self.scheduler.release(request_id, self._clock())
        self._grants.pop(request_id, None)
        future = self._waiting.pop(request_id, None)
        if future is not None and not future.done():
            future.set_exception(SandboxLost(f"request {request_id} was withdrawn"))
            future.exception()  # it may be that nobody waits
        self._collect()

    async def close(self) -> None:
        """Stop deciding. Boxes are the nodes' to end."""
        for task in (*self._loops, *self._tasks):
            task.cancel()
        await asyncio.gather(*self._loops, *self._tasks, return_exceptions=True)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(SandboxLost("the fleet was closed"))
                future.exception()

    async def _tick(self) -> None:
        while True:
            self.scheduler.tick(self._clock(), self._rng)
            self._collect()
            await asyncio.sleep(self._tick_seconds)

    async def _watch(self, spec: NodeSpec, node: Node) -> None:
        """Ask a node for reports until another takes its name."""
        while self._nodes.get(spec.node_id) is node:
            asked_at_seconds = self._clock()
            try:
                async with asyncio.timeout(self._heartbeat_seconds * 5):
                    report = await node.report(asked_at_seconds)
            except (*_FAILURES, TimeoutError) as error:
                _logger.info("node is silent %s", fields(node=spec.node_id, error=str(error)))
            else:
                if not self.scheduler.report(report, self._clock()):
                    self.scheduler.join(spec, self._clock())
                self._collect()
            await asyncio.sleep(self._heartbeat_seconds)

    def _collect(self) -> None:
        for notice in self.scheduler.take_notices():
            self._tell(notice)
        for order in self.scheduler.take_orders():
            task = asyncio.create_task(self._carry_out(order))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

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
            self.scheduler.box_up(order.box_id, self._clock())
        else:
            self.scheduler.box_failed(order.box_id)
        self._collect()

    def _tell(self, notice: Notice) -> None:
        request_id = notice.request_id
        if isinstance(notice, Granted):
            self._grants[request_id] = notice
            future = self._waiting.pop(request_id, None)
            if future is not None and not future.done():
                future.set_result(notice)
        elif isinstance(notice, Refused):
            future = self._waiting.pop(request_id, None)
            if future is not None and not future.done():
                future.set_exception(
                    CapacityExhausted(
                        f"request {request_id} got no box: {notice.reason.value}; "
                        f"{len(self.scheduler.queue)} requests wait"
                    )
                )
                future.exception()
        else:
            self._grants.pop(request_id, None)
            why = "not renewed in time" if notice.was_expired else "its box was lost"
            _logger.info("lease ended %s", fields(lease=request_id, why=why))
