"""Batches Ray calls, whose cost is per call: items sent within a short time share one call, and answers are collected
together.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ray.exceptions import RayError

COLLECT_SECONDS = 5.0  # an empty answer after this long shows that the actor is alive

Item = TypeVar("Item")


class Outbox(Generic[Item]):
    """Answers that wait to be collected by one caller."""

    def __init__(self, gather_seconds: float) -> None:
        """`gather_seconds`: answers within this time of the first are collected with it."""
        self._gather_seconds = gather_seconds
        self._items: list[Item] = []
        self._has_items = asyncio.Event()

    def put(self, item: Item) -> None:
        self._items.append(item)
        self._has_items.set()

    async def collect(self) -> list[Item]:
        """All answers since the last call. Waits up to COLLECT_SECONDS for the first."""
        try:
            await asyncio.wait_for(self._has_items.wait(), COLLECT_SECONDS)
        except TimeoutError:
            return []
        await asyncio.sleep(self._gather_seconds)
        items, self._items = self._items, []
        self._has_items.clear()
        return items


class Flush:
    """Coalesced calls: `send` runs once for all `plan` calls since it last ran."""

    def __init__(self, send: Callable[[], None], gather_seconds: float = 0.0) -> None:
        self._send, self._gather_seconds = send, gather_seconds
        self._is_planned = False

    def plan(self) -> None:
        """Sends soon, on the running event loop."""
        if not self._is_planned:
            self._is_planned = True
            asyncio.get_running_loop().call_later(self._gather_seconds, self._run)

    def _run(self) -> None:
        self._is_planned = False
        self._send()


class Deliveries:
    """Ray calls without a result, watched for failure."""

    def __init__(self) -> None:
        self._under_way: set[asyncio.Future[Any]] = set()

    def watch(self, call: Any, on_lost: Callable[[RayError], None]) -> None:
        """Calls `on_lost` with Ray's error when the call fails, for example because its actor is restarting."""
        delivery = asyncio.ensure_future(call)
        self._under_way.add(delivery)

        def end(done: asyncio.Future[Any]) -> None:
            self._under_way.discard(done)
            error = None if done.cancelled() else done.exception()
            if isinstance(error, RayError):
                on_lost(error)
            elif error is not None:
                raise error

        delivery.add_done_callback(end)
