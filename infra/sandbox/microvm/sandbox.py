"""One virtual machine as a sandbox: commands and files come from BoxTools, copies are made here.

It starts no other machine; the backend does.
"""

import asyncio
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ostinato.infra.platform.errors import SandboxError
from ostinato.infra.sandbox.host.roster import Lifetime
from ostinato.infra.sandbox.host.tools import FILE_SECONDS, BoxTools
from ostinato.infra.sandbox.microvm.changes import Changes, changes_of_files, changes_of_reply
from ostinato.infra.sandbox.microvm.channel import MachineChannel
from ostinato.infra.sandbox.microvm.machine import Machine, MachineState
from ostinato.infra.sandbox.microvm.templates import Template
from ostinato.infra.sandbox.protocol import (
    Capabilities,
    SandboxSpec,
    SandboxStats,
    Snapshot,
    SnapshotKind,
)

_ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "TERM": "dumb",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PIP_NO_INPUT": "1",
}
_CHANGES_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Origin:
    """What a sandbox was made from."""

    spec: SandboxSpec
    template: Template
    changes: Changes = field(default_factory=Changes)  # of the repository when it was made
    parent_id: str | None = None


class Keeper(Protocol):
    """What a sandbox asks of its backend."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def clock(self) -> Callable[[], float]: ...

    async def take_snapshot(self, sandbox: "MicroVmSandbox", kind: SnapshotKind) -> Snapshot: ...

    async def compare(
        self, sandbox: "MicroVmSandbox", base: Snapshot | None
    ) -> dict[str, bytes | None]: ...

    def forget(self, sandbox: "MicroVmSandbox") -> None: ...


class MicroVmSandbox(BoxTools):
    """One machine. Made by MicroVmBackend; belongs to its event loop."""

    def __init__(self, keeper: Keeper, sandbox_id: str, origin: Origin, machine: Machine) -> None:
        channel = MachineChannel(machine)
        super().__init__(channel)
        self.sandbox_id = sandbox_id
        self.origin = origin
        self.pause_seconds = 0.0  # how long the latest copy made the guest stand still
        self.copied_bytes = 0  # of memory, in the latest copy; 0: all of it, through the monitor
        self.hello_seconds = 0.0  # from the start of QEMU to the guest's first answer
        self.machine = machine
        self._machine_channel = channel
        self._keeper = keeper
        self._lifetime = Lifetime(keeper.clock, origin.spec.ttl_seconds)
        self._is_closed = False

    @property
    def spec(self) -> SandboxSpec:
        """What it was made of."""
        return self.origin.spec

    @property
    def capabilities(self) -> Capabilities:
        """Those of the backend."""
        return self._keeper.capabilities

    @property
    def is_expired(self) -> bool:
        """Whether its time to live is over."""
        return self._lifetime.is_over

    def count_memory_kills(self) -> int:
        """How often the guest's kernel ended a process for memory, as far as commands told."""
        return self._machine_channel.num_memory_kills

    async def open(self, started_at: float) -> None:
        """Give a copy of a template its own clock and random pool, its files and its limits."""
        spec, requests = self.spec, [self._refresh(is_copy=False, started_at=started_at)]
        if spec.files:
            requests.append(self.put(changes_of_files(spec.files)))
        limits = spec.limits
        variables = {**_ENVIRONMENT, **spec.environment}
        requests.append(
            self._ask(
                "open",
                limits.start_seconds + FILE_SECONDS,
                environment=[f"{name}={value}" for name, value in variables.items()],
                limits={
                    "process_memory_bytes": limits.process_memory_bytes,
                    "processes": limits.processes,
                    "file_bytes": limits.file_bytes,
                    "writable_bytes": limits.writable_bytes,
                },
            )
        )
        # They are sent in this order, and answered in it, without a wait in between.
        await asyncio.gather(*requests)

    async def wake(self, started_at: float) -> None:
        """Give a copy of a running machine its own clock and random pool."""
        await self._refresh(is_copy=True, started_at=started_at)

    async def put(self, changes: Changes) -> None:
        """Lay changes over the repository."""
        fields, blobs = changes.to_request()
        await self._ask("put", _CHANGES_SECONDS, blobs=blobs, **fields)

    async def read_changes(self) -> Changes:
        """What differs from the pristine repository and the spec's files."""
        return changes_of_reply(*await self.channel.request("changes", _CHANGES_SECONDS))

    async def copy_state(self, devices_file: Path) -> MachineState:
        """The state of this machine; it stands still for some milliseconds and goes on."""
        async with self._machine_channel.held():
            started = time.perf_counter()
            await self.machine.pause()
            try:
                state = await self.machine.copy_state(devices_file)
            finally:
                await self.machine.resume()
                self.pause_seconds = time.perf_counter() - started
        self.copied_bytes = 0 if state.pages is None else len(state.pages.content)
        return state

    async def snapshot(self, kind: SnapshotKind = SnapshotKind.FILES) -> Snapshot:
        """Freeze the files, or the whole machine, as they are now; the sandbox goes on."""
        return await self._keeper.take_snapshot(self, kind)

    async def diff(self, base: Snapshot | None = None) -> dict[str, bytes | None]:
        """Regular files of /repo that differ from `base` (None: as created); None: removed."""
        return await self._keeper.compare(self, base)

    async def stats(self) -> SandboxStats:
        """What the guest uses now, by its own count; processor time is that of the machine."""
        reply, _ = await self.channel.request("stats", FILE_SECONDS)
        return SandboxStats(
            memory_bytes=reply["memory_bytes"],
            cpu_seconds=self.machine.cpu_seconds,
            num_processes=reply["num_processes"],
            written_bytes=reply["written_bytes"],
            expires_in_seconds=self._lifetime.left_seconds,
        )

    async def renew(self, ttl_seconds: float | None = None) -> None:
        """Count the time to live from now; None: as long as the spec said."""
        self._lifetime.renew(ttl_seconds)

    async def close(self) -> None:
        """End the machine; its memory and files are gone. A second close does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        await self._machine_channel.close()
        self._keeper.forget(self)

    def lose(self, error: SandboxError) -> None:
        """Give the machine up."""
        self._machine_channel.lose(error)

    def _refresh(self, *, is_copy: bool, started_at: float) -> Awaitable[None]:
        async def ask() -> None:
            first_answer_at = await self._machine_channel.refresh(
                self.spec.limits.start_seconds + FILE_SECONDS,
                blobs=(os.urandom(48),),
                host_name=self.sandbox_id,
                machine_id=secrets.token_hex(16),
                is_copy=int(is_copy),
            )
            self.hello_seconds = first_answer_at - started_at

        return ask()

    async def _ask(
        self, operation: str, seconds: float, blobs: tuple[bytes, ...] = (), **fields: object
    ) -> None:
        await self.channel.request(operation, seconds, blobs=blobs, **fields)
