"""QEMU's monitor: sends commands to one machine over QMP, and saves its state to a file."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from qemu.qmp import ExecuteError, QMPClient, QMPError

from ostinato.infra.platform.errors import SandboxError, SandboxLost

_MONITOR_SECONDS = 60.0
_STATE_SECONDS = 120.0
_POLL_SECONDS = 0.002


class Monitor:
    """Connection to a machine's monitor, opened at the first command. Belongs to one event loop."""

    def __init__(self, name: str, control: socket.socket, read_stderr: Callable[[], str]) -> None:
        """`read_stderr`: the end of the stderr of the machine's process, for error messages."""
        self._name = name
        self._socket = control
        self._read_stderr = read_stderr
        self._client: QMPClient | None = None
        self._connecting = asyncio.Lock()

    async def run(self, command: str, arguments: Mapping[str, Any] | None = None) -> Any:
        """The answer to a command. Raises SandboxError if QEMU refuses it, SandboxLost without an answer."""
        try:
            async with asyncio.timeout(_MONITOR_SECONDS):
                client = await self._connect()
                return await client.execute(command, dict(arguments or {}))
        except ExecuteError as error:
            raise SandboxError(f"{self._name} refused {command}: {error}") from error
        except (QMPError, OSError, TimeoutError, EOFError) as error:
            text = f"{self._name}: {command} failed: {type(error).__name__} {error}"
            raise SandboxLost(f"{text}; {self._read_stderr()}") from error

    async def ignore_shared_memory(self) -> None:
        """Leaves memory shared with a file out of saved states. A state must be loaded with the same setting."""
        capability = {"capability": "x-ignore-shared", "state": True}
        await self.run("migrate-set-capabilities", {"capabilities": [capability]})

    async def save(self, path: Path) -> None:
        """Writes the machine's state to a file."""
        with path.open("wb") as file:
            (await self._connect()).send_fd_scm(file.fileno())
            await self.run("getfd", {"fdname": "state"})
            await self.run("migrate", {"uri": "fd:state"})
            await self.wait_migrated()

    async def wait_migrated(self) -> None:
        """Waits until a state is saved or loaded."""
        deadline = asyncio.get_running_loop().time() + _STATE_SECONDS
        while True:
            answer = await self.run("query-migrate")
            status = answer.get("status", "none")
            if status == "completed":
                return
            if status in ("failed", "cancelled"):
                reason = answer.get("error-desc", "no reason given")
                raise SandboxLost(f"{self._name}: state {status}: {reason}; {self._read_stderr()}")
            if asyncio.get_running_loop().time() > deadline:
                raise SandboxLost(f"{self._name}: state is {status} after {_STATE_SECONDS} s")
            await asyncio.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """Disconnects in the background. `wait_for_disconnects` waits for the end."""
        if self._client is None:
            self._socket.close()
            return
        task = asyncio.get_running_loop().create_task(_disconnect(self._client))
        _closing.add(task)
        task.add_done_callback(_closing.discard)

    async def _connect(self) -> QMPClient:
        async with self._connecting:
            if self._client is None:
                client = QMPClient(self._name)
                self._socket.setblocking(False)
                await client.connect(self._socket)
                self._client = client
            return self._client


_closing: set[asyncio.Task[None]] = set()


async def wait_for_disconnects() -> None:
    """Waits until the monitors of closed machines are disconnected."""
    await asyncio.gather(*_closing)


async def _disconnect(client: QMPClient) -> None:
    with contextlib.suppress(QMPError, OSError, EOFError):
        await client.disconnect()
