"""Requests to the agent of one machine, and the moments when none are under way.

They are held back while a machine is copied, so that a copy begins between two frames.
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
# the guest's clock is late by as long as the request took, so a slow one is sent again; on a busy host
# at most this often
_PROMPT_SECONDS = 0.1
_MAX_TIMES_TOLD = 8


class MachineChannel(BoxChannel):
    """A machine with requests in flight. Belongs to the event loop that opened it."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self._open = asyncio.Event()
        self._open.set()

    async def request(
        self, operation: str, answer_seconds: float, blobs: Blobs = (), **fields: Any
    ) -> Reply:
        """Send one request and wait for its reply. While requests are held back, wait first."""
        await self._wait_open()
        return await super().request(operation, answer_seconds, blobs=blobs, **fields)

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Nothing travels in this block: sent replies have arrived, later ones wait in the guest.

        The guest may stand still in it: its clock is set afterwards.
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
        """Sends the guest the time, and its random bytes and name as blobs. Returns the instant of its
        first answer (perf_counter).
        """
        await self._wait_open()
        return await self._refresh(answer_seconds, blobs, **fields)

    async def _wait_open(self) -> None:
        while not self._open.is_set():  # who woke earlier may hold it again
            await self._open.wait()

    async def _refresh(self, answer_seconds: float, blobs: Blobs = (), **fields: Any) -> float:
        asked_at = time.perf_counter()
        await super().request(
            "refresh", answer_seconds, blobs=blobs, wall_ns=time.time_ns(), **fields
        )
        first_answer_at = answered_at = time.perf_counter()
        for _ in range(_MAX_TIMES_TOLD - 1):
            if answered_at - asked_at <= _PROMPT_SECONDS:
                break
            asked_at = answered_at
            await super().request("refresh", answer_seconds, wall_ns=time.time_ns())
            answered_at = time.perf_counter()
        return first_answer_at
