"""A namespace box with a network of given settings."""

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from ostinato.infra.sandbox.backends import open_backend
from ostinato.infra.sandbox.egress.config import EgressConfig, NetworkRequest
from ostinato.infra.sandbox.egress.door import Door, Doors
from ostinato.infra.sandbox.environment import RepositoryEnvironment
from ostinato.infra.sandbox.protocol import Sandbox
from tests.fakes.repositories import WORDKIT, open_repository

COMMAND_SECONDS = 120.0
OUTPUT_BYTES = 1 << 20


@dataclass
class OpenBox:
    """A box with a network, and what it asked for."""

    sandbox: Sandbox
    door: Door
    requests: list[NetworkRequest] = field(default_factory=list)

    async def shell(self, command: str) -> str:
        """Output of a command."""
        result = await self.sandbox.exec(command, COMMAND_SECONDS, OUTPUT_BYTES)
        return result.output.decode()

    async def python(self, source: str) -> str:
        """Output of a Python program."""
        await self.sandbox.write("/tmp/asks.py", source.encode())
        return await self.shell("python3 /tmp/asks.py")


@asynccontextmanager
async def open_environment(config: EgressConfig, **options: Any) -> AsyncIterator[Any]:
    """A function that opens boxes with a network. `options`: those of Doors."""
    environment = RepositoryEnvironment(
        open_repository(WORDKIT), open_backend(), boxes=8, owns_backend=True
    )
    doors = Doors(config, **options)

    @asynccontextmanager
    async def open_box(closed_packages: Collection[str] = ()) -> AsyncIterator[OpenBox]:
        requests: list[NetworkRequest] = []
        async with doors.open("run.g0.t0", closed_packages, requests) as door:
            sandbox = await environment.lease(door=door)
            try:
                async with door.forwarded(sandbox):
                    yield OpenBox(sandbox, door, requests)
            finally:
                await environment.release(sandbox)

    try:
        yield open_box
    finally:
        await environment.close()
        doors.close()
