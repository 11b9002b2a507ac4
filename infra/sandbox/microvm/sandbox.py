"""One virtual machine as a sandbox."""

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ostinato.infra.platform.errors import OutputLimit, SandboxError, SandboxNotFound
from ostinato.infra.sandbox.host.tools import FILE_SECONDS, BoxTools
from ostinato.infra.sandbox.microvm.channel import MachineChannel
from ostinato.infra.sandbox.microvm.machine import Machine, MachineState
from ostinato.infra.sandbox.microvm.repository import MAX_DIFF_BYTES, compare_files
from ostinato.infra.sandbox.microvm.templates import Template
from ostinato.infra.sandbox.protocol import (
    FileKind,
    FileStatus,
    SandboxSpec,
    Snapshot,
    SnapshotKind,
)
from ostinato.infra.sandbox.snapshots.store import SKIPPED_NAMES

_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
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
_READ_BATCH_BYTES = 32 << 20
_MAX_DEPTH = 200


@dataclass(frozen=True, slots=True)
class Origin:
    """Source of a sandbox: specification, template, changes and parent."""

    spec: SandboxSpec
    template: Template
    pristine: dict[str, bytes] = field(default_factory=dict)  # the repository's regular files


class Keeper(Protocol):
    """Interface of the backend towards its sandboxes."""

    async def take_snapshot(self, sandbox: "MicroVmSandbox", kind: SnapshotKind) -> Snapshot: ...

    def files_of(self, snapshot: Snapshot) -> dict[str, bytes]: ...

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
        self.machine = machine
        self._machine_channel = channel
        self._keeper = keeper
        self._pausing = asyncio.Lock()
        self._is_closed = False

    async def open(self) -> None:
        """Give a copy of a template, or of a machine whose files alone are wanted, its own clock,
        random pool, limits and variables; no process of it goes on.
        """
        limits, seconds = self.origin.spec.limits, self._start_seconds
        variables = {**_ENVIRONMENT, **self.origin.spec.environment}
        # They are sent in this order, and answered in it, without a wait in between. No `resume`:
        # a process that was stopped in the source ends without another step.
        await asyncio.gather(
            self._refresh(),
            self.channel.request(
                "open",
                seconds,
                blobs=tuple(os.fsencode(f"{name}={value}") for name, value in variables.items()),
                writable_bytes=limits.writable_bytes,
                file_bytes=limits.file_bytes,
            ),
            self.channel.request(
                "hello",
                seconds,
                process_memory_bytes=limits.process_memory_bytes,
                processes=limits.processes,
            ),
        )

    async def wake(self) -> None:
        """Give a copy of a running machine its own clock and random pool, and let it go on."""
        await asyncio.gather(self._refresh(), self.channel.request("resume", self._start_seconds))

    async def lay_over(self, files: dict[str, bytes | None]) -> None:
        """Write and remove files; one to be removed need not be there."""
        for path, error in (await self.write_files(files)).items():
            if files[path] is not None or not isinstance(error, SandboxNotFound):
                raise error

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """No process of the box runs in this block. Its copies made here need `wake`."""
        async with self._pausing:
            await self.channel.request("pause", FILE_SECONDS)
            try:
                yield
            finally:
                await self.channel.request("resume", FILE_SECONDS)

    async def read_repository(self) -> dict[str, bytes]:
        """Regular files of /repo; of one moment when read in `paused`."""
        listed = await self.list_files(max_depth=_MAX_DEPTH)
        files: dict[str, bytes] = {}
        for batch in _batches(listed):
            for path, content in zip(batch, await self.read_files(batch), strict=True):
                if isinstance(content, SandboxError):
                    raise content
                files[path] = content
        return files

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
        """Regular files of /repo that differ from `base` (None: the repository); None: removed."""
        before = self.origin.pristine if base is None else self._keeper.files_of(base)
        async with self.paused():
            files = await self.read_repository()
        return compare_files(before, files)

    async def close(self) -> None:
        """End the machine; its memory and files are gone. A second close does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        await self._machine_channel.close()
        self._keeper.forget(self)

    async def _refresh(self) -> None:
        identity = (os.urandom(48), self.sandbox_id.encode())
        await self._machine_channel.refresh(self._start_seconds, blobs=identity)

    @property
    def _start_seconds(self) -> float:
        return self.origin.spec.limits.start_seconds + FILE_SECONDS


def _batches(listed: Sequence[FileStatus]) -> Iterator[list[str]]:
    """Paths of regular files in groups that a guest may answer at once; no caches."""
    files = [
        status
        for status in listed
        if status.kind is FileKind.FILE and not SKIPPED_NAMES.intersection(status.path.split("/"))
    ]
    num_bytes = sum(status.num_bytes for status in files)
    if num_bytes > 2 * MAX_DIFF_BYTES:
        raise OutputLimit(f"/repo holds {num_bytes} bytes, at most {2 * MAX_DIFF_BYTES} are read")
    for _, group in itertools.groupby(
        zip(files, itertools.accumulate(status.num_bytes for status in files), strict=True),
        key=lambda item: item[1] // _READ_BATCH_BYTES,
    ):
        yield [status.path for status, _ in group]
