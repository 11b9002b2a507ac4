"""The `microvm` backend: virtual machines that start as copies of a template or of each other.

A snapshot holds the state of the devices and the pages that a machine has written since it left its template. A machine
made from a memory snapshot continues its processes; one made from a file snapshot ends them first.
"""

import asyncio
import hashlib
import itertools
import os
import shlex
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ostinato.infra.platform.errors import (
    InvalidArgument,
    OutputLimit,
    SandboxError,
    SandboxNotFound,
)
from ostinato.infra.sandbox.host.backend import start_all
from ostinato.infra.sandbox.host.box import python_path
from ostinato.infra.sandbox.host.system import VARIABLES
from ostinato.infra.sandbox.host.tools import FILE_SECONDS, BoxTools, FileStatus
from ostinato.infra.sandbox.microvm.channel import MachineChannel
from ostinato.infra.sandbox.microvm.image import ImageKind, check_tools, find_image, find_kind
from ostinato.infra.sandbox.microvm.machine import Accelerator, Machine, MachineState, find_program
from ostinato.infra.sandbox.microvm.monitor import wait_for_disconnects
from ostinato.infra.sandbox.microvm.templates import Template, TemplateStore
from ostinato.infra.sandbox.protocol import Sandbox, SandboxSpec, Snapshot, SnapshotKind
from ostinato.infra.sandbox.snapshots.store import MAX_DIFF_BYTES, SKIPPED_NAMES, compare_files

_ENVIRONMENT = {**VARIABLES, "PATH": "/usr/local/bin:/usr/bin:/bin", "PIP_NO_INPUT": "1"}
_READ_BATCH_BYTES = 32 << 20
_MAX_DEPTH = 200
_PATHS_PER_COMMAND = 100  # of some hundred bytes each; a command has at most 128 KiB
_TIMES_SECONDS, _MAX_TIMES_BYTES = 30.0, 1 << 20


def check_host(image_folder: Path) -> None:
    """Raises SandboxError if this host cannot run machines. The message names what to install."""
    find_program()
    if find_image(ImageKind.PYTHON, image_folder) is None:
        check_tools()


@dataclass(frozen=True, slots=True)
class Origin:
    """Source of a sandbox: specification, template and pristine files."""

    spec: SandboxSpec
    template: Template
    pristine: dict[str, bytes] = field(default_factory=dict)  # the repository's regular files


class MicroVmSandbox(BoxTools):
    """One machine, created by MicroVmBackend. Belongs to its event loop."""

    def __init__(
        self, backend: "MicroVmBackend", sandbox_id: str, origin: Origin, machine: Machine
    ) -> None:
        channel = MachineChannel(machine)
        super().__init__(channel)
        self.sandbox_id = sandbox_id
        self.origin = origin
        self.pause_seconds = 0.0  # time for which the latest copy paused the guest
        self.copied_bytes = 0  # memory copied by the latest copy
        self.machine = machine
        self._machine_channel = channel
        self._backend = backend

    async def open(self) -> None:
        """Gives a copy of a template, or of a machine of which only the files are kept, its own clock, random pool,
        limits and variables, and ends its processes.
        """
        spec, seconds = self.origin.spec, self._start_seconds
        limits = spec.limits
        variables = {**_ENVIRONMENT, "PYTHONPATH": python_path(spec.import_roots)}
        # The requests are sent and answered in this order, without a wait in between. There is no `resume`, so
        # that a process stopped in the source ends without running again.
        await asyncio.gather(
            self._refresh(),
            self.channel.request(
                "open",
                seconds,
                blobs=tuple(os.fsencode(f"{name}={value}") for name, value in variables.items()),
                writable_bytes=limits.writable_bytes,
                file_bytes=limits.file_bytes,
            ),
            self.hello(limits, seconds),
        )

    async def resume(self) -> None:
        """Gives a copy of a running machine its own clock and random pool, and continues its processes."""
        await asyncio.gather(self._refresh(), self.channel.request("resume", self._start_seconds))

    async def apply_files(self, files: dict[str, bytes | None]) -> None:
        """Writes and removes files. A file to remove may be missing. Files keep their times, which otherwise would
        show which files a problem changed.
        """
        times = await self._read_times({*files, *(str(Path(path).parent) for path in files)})
        errors = await self.write_files(files)
        await self._set_times(times)
        for path, error in errors.items():
            if files[path] is not None or not isinstance(error, SandboxNotFound):
                raise error

    async def _read_times(self, paths: Collection[str]) -> dict[str, str]:
        """Modification times, in seconds, of the paths that exist."""
        times: dict[str, str] = {}
        for chunk in _chunked(sorted(paths)):
            command = f"stat -c '%Y %n' -- {shlex.join(chunk)} 2>/dev/null"
            result = await self.exec(command, _TIMES_SECONDS, _MAX_TIMES_BYTES)
            lines = (line.split(" ", 1) for line in os.fsdecode(result.output).splitlines())
            times |= {line[1]: line[0] for line in lines if len(line) == 2}
        return {path: times[path] for path in paths if path in times}

    async def _set_times(self, times: Mapping[str, str]) -> None:
        for chunk in _chunked(sorted(times)):
            touched = (f"touch -c -m -d @{times[path]} -- {shlex.quote(path)}" for path in chunk)
            await self.exec("; ".join(touched), _TIMES_SECONDS)

    async def read_repository(self) -> dict[str, bytes]:
        """Regular files of /repo. They are consistent only when read in a `paused` block."""
        listed = await self.list_files(max_depth=_MAX_DEPTH)
        files: dict[str, bytes] = {}
        for batch in _batches(listed):
            for path, content in zip(batch, await self.read_files(batch), strict=True):
                if isinstance(content, SandboxError):
                    raise content
                files[path] = content
        return files

    async def copy_state(self, devices_file: Path) -> MachineState:
        """The state of this machine, which is paused for some milliseconds while it is copied."""
        async with self._machine_channel.held():
            started = time.perf_counter()
            await self.machine.pause()
            try:
                memory_file = self.origin.template.state.memory_file
                state = await self.machine.copy_state(memory_file, devices_file)
            finally:
                await self.machine.resume()
                self.pause_seconds = time.perf_counter() - started
        self.copied_bytes = len(state.pages.content) if state.pages else 0
        return state

    async def snapshot(self, kind: SnapshotKind = SnapshotKind.FILES) -> Snapshot:
        """A snapshot of the files or of the whole machine. The sandbox keeps running."""
        return await self._backend.take_snapshot(self, kind)

    async def diff(self, base: Snapshot | None = None) -> dict[str, bytes | None]:
        before = self.origin.pristine if base is None else self._backend.files_of(base)
        async with self.paused():
            files = await self.read_repository()
        return compare_files(before, files)

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        await self._machine_channel.close()
        self._backend.forget(self)

    async def _refresh(self) -> None:
        identity = (os.urandom(48), self.sandbox_id.encode())
        await self._machine_channel.refresh(self._start_seconds, blobs=identity)

    @property
    def _start_seconds(self) -> float:
        return self.origin.spec.limits.start_seconds + FILE_SECONDS


@dataclass(frozen=True, slots=True)
class _SavedSnapshot:
    """A snapshot with the origin, files and state from which its sandboxes start."""

    snapshot: Snapshot
    origin: Origin
    files: dict[str, bytes]
    state: MachineState


class MicroVmBackend:
    """Virtual machines on this host. Belongs to one event loop, whose thread must outlive the machines."""

    name = "microvm"
    keeps_memory = True

    def __init__(
        self,
        image_folder: Path,
        *,
        accelerator: Accelerator | None = None,
    ) -> None:
        """`accelerator` None: KVM if a machine boots with it, else TCG. Images are kept in `image_folder`."""
        find_program()
        self.templates = TemplateStore(image_folder, accelerator=accelerator)
        self._numbers = itertools.count()
        self._sandboxes: dict[str, MicroVmSandbox] = {}
        self._snapshots: dict[str, _SavedSnapshot] = {}

    async def create(self, spec: SandboxSpec) -> MicroVmSandbox:
        """A machine with the spec's repository and files that answers requests."""
        if spec.mounts or spec.variables:
            raise InvalidArgument(
                f"mounts and variables are {sorted({**spec.mounts, **spec.variables})}, wanted none: a machine sees "
                "no files of the host"
            )
        template = await self.templates.get(
            find_kind(spec.template), spec.limits.memory_bytes, spec.repository
        )
        origin = Origin(spec, template, template.repository.files)

        async def prepare(sandbox: MicroVmSandbox) -> None:
            await sandbox.open()
            await sandbox.apply_files(dict(spec.files))

        return await self._start(origin, template.state, prepare)

    async def fork(self, source: Snapshot | Sandbox, count: int = 1) -> tuple[MicroVmSandbox, ...]:
        """New machines in the state of `source`, with its processes if it has them."""
        prepare = MicroVmSandbox.resume
        if isinstance(source, Snapshot):
            saved = self._find_snapshot(source)
            if source.kind is SnapshotKind.FILES:
                prepare = MicroVmSandbox.open
            return await start_all(
                self._start(saved.origin, saved.state, prepare) for _ in range(count)
            )
        sandbox = self._find(source)
        devices_file = self._new_devices_file()
        try:
            state = await sandbox.copy_state(devices_file)
            return await start_all(
                self._start(sandbox.origin, state, prepare) for _ in range(count)
            )
        finally:
            devices_file.unlink(missing_ok=True)

    async def remove_snapshot(self, snapshot: Snapshot) -> None:
        """Removes a snapshot and its files. Machines that started from it keep running."""
        saved = self._find_snapshot(snapshot)
        del self._snapshots[snapshot.snapshot_id]
        saved.state.devices_file.unlink()

    async def close(self) -> None:
        """Ends every machine and frees all memory."""
        for sandbox in list(self._sandboxes.values()):
            await sandbox.close()
        self._snapshots.clear()
        await self.templates.close()
        await wait_for_disconnects()

    async def take_snapshot(self, sandbox: MicroVmSandbox, kind: SnapshotKind) -> Snapshot:
        """Takes a snapshot for `MicroVmSandbox.snapshot`."""
        devices_file = self._new_devices_file()
        async with sandbox.paused():
            files = await sandbox.read_repository()
            state = await sandbox.copy_state(devices_file)
        changes = compare_files(sandbox.origin.pristine, files)
        digest = hashlib.sha256(f"{kind}\n{sandbox.origin.template.repository.key}\n".encode())
        for path, content in changes.items():
            digest.update(f"{len(path)}:{path}:{-1 if content is None else len(content)}:".encode())
            digest.update(content or b"")
        if kind is SnapshotKind.MEMORY:
            digest.update(devices_file.read_bytes())
            if state.pages is not None:
                digest.update(state.pages.content)
        snapshot = Snapshot(snapshot_id=digest.hexdigest()[:32], kind=kind)
        known = self._snapshots.get(snapshot.snapshot_id)
        if known is not None:
            devices_file.unlink()
            return known.snapshot
        self._snapshots[snapshot.snapshot_id] = _SavedSnapshot(
            snapshot, sandbox.origin, files, state
        )
        return snapshot

    def files_of(self, snapshot: Snapshot) -> dict[str, bytes]:
        """Regular files of the repository in a snapshot."""
        return self._find_snapshot(snapshot).files

    def forget(self, sandbox: MicroVmSandbox) -> None:
        """Removes a machine that has ended from the list."""
        self._sandboxes.pop(sandbox.sandbox_id, None)

    async def _start(
        self,
        origin: Origin,
        state: MachineState,
        prepare: Callable[[MicroVmSandbox], Awaitable[None]],
    ) -> MicroVmSandbox:
        machine = await Machine.begin(origin.template.shape, state)
        sandbox = MicroVmSandbox(self, f"microvm-{next(self._numbers)}", origin, machine)
        self._sandboxes[sandbox.sandbox_id] = sandbox
        try:
            await prepare(sandbox)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    def _find(self, sandbox: Sandbox) -> MicroVmSandbox:
        found = self._sandboxes.get(sandbox.sandbox_id)
        if found is None or found is not sandbox:
            raise SandboxNotFound(f"no sandbox {sandbox.sandbox_id} in this backend")
        return found

    def _find_snapshot(self, snapshot: Snapshot) -> _SavedSnapshot:
        saved = self._snapshots.get(snapshot.snapshot_id)
        if saved is None:
            raise SandboxNotFound(f"no snapshot {snapshot.snapshot_id} in this backend")
        return saved

    def _new_devices_file(self) -> Path:
        return self.templates.folder / f"state-{next(self._numbers)}.devices"


def _batches(listed: Sequence[FileStatus]) -> Iterator[list[str]]:
    """Paths of regular files, without caches, in groups that a guest can return in one reply."""
    files = [
        status
        for status in listed
        if status.kind == "f" and not SKIPPED_NAMES.intersection(status.path.split("/"))
    ]
    num_bytes = sum(status.num_bytes for status in files)
    if num_bytes > 2 * MAX_DIFF_BYTES:
        raise OutputLimit(f"/repo holds {num_bytes} bytes, at most {2 * MAX_DIFF_BYTES} are read")
    for _, group in itertools.groupby(
        zip(files, itertools.accumulate(status.num_bytes for status in files), strict=True),
        key=lambda item: item[1] // _READ_BATCH_BYTES,
    ):
        yield [status.path for status, _ in group]


def _chunked(paths: Sequence[str]) -> Iterator[Sequence[str]]:
    """Paths in groups that fit into one command."""
    for start in range(0, len(paths), _PATHS_PER_COMMAND):
        yield paths[start : start + _PATHS_PER_COMMAND]
