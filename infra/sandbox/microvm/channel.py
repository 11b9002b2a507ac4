"""Requests to the agent of one machine.

Requests are held back while the machine is copied, so that a copy begins between two frames.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from ostinato.infra.sandbox.host.channel import BoxChannel
from ostinato.infra.sandbox.host.tools import Blobs, Reply
from ostinato.infra.sandbox.microvm.machine import Machine

_HOLD_SECONDS = 60.0
# The guest's clock is late by the duration of the refresh request, so a request slower than this is repeated.
_PROMPT_SECONDS = 0.1
_MAX_REFRESHES = 8


class MachineChannel(BoxChannel):
    """Connection to a machine with any number of requests in flight. Belongs to the event loop that opened it."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self._open = asyncio.Event()
        self._open.set()

    async def request(
        self, operation: str, answer_seconds: float, blobs: Blobs = (), **fields: Any
    ) -> Reply:
        """Sends one request and waits for its reply. Waits first while requests are held back."""
        await self._wait_open()
        return await super().request(operation, answer_seconds, blobs=blobs, **fields)

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Keeps the stream idle during a `with` block: sent replies have arrived, later ones wait in the guest.

        The guest may be paused in the block, so its clock is set afterwards.
        """
        await self._wait_open()
        self._open.clear()
        try:
            await super().request("hold", _HOLD_SECONDS)
            yield
            await self._refresh(_HOLD_SECONDS)
        finally:
            self._open.set()

    async def refresh(self, answer_seconds: float, blobs: Blobs = (), **fields: Any) -> float:
        """Sends the guest the time, with random bytes and its host name as blobs. Returns the instant of the
        first answer (perf_counter).
        """
        await self._wait_open()
        return await self._refresh(answer_seconds, blobs, **fields)

    async def _wait_open(self) -> None:
        while not self._open.is_set():  # another waiter may have closed it again
            await self._open.wait()

    async def _refresh(self, answer_seconds: float, blobs: Blobs = (), **fields: Any) -> float:
        asked_at = time.perf_counter()
        await super().request(
            "refresh", answer_seconds, blobs=blobs, wall_ns=time.time_ns(), **fields
        )
        first_answer_at = answered_at = time.perf_counter()
        for _ in range(_MAX_REFRESHES - 1):
            if answered_at - asked_at <= _PROMPT_SECONDS:
                break
            asked_at = answered_at
            await super().request("refresh", answer_seconds, wall_ns=time.time_ns())
            answered_at = time.perf_counter()
        return first_answer_at
