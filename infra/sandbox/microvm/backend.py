"""The `microvm` backend: virtual machines that start as copies of a template or of one another.

A snapshot holds the pages a machine has written since its template, and its devices. A copy of one of
memory goes on with its processes; a copy of one of files ends them first.
"""

import asyncio
import hashlib
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ostinato.infra.platform.errors import SandboxNotFound
from ostinato.infra.sandbox.host.backend import start_all
from ostinato.infra.sandbox.microvm.image import ImageKind, check_tools, find_image, find_kind
from ostinato.infra.sandbox.microvm.machine import (
    Accelerator,
    Machine,
    MachineState,
    find_program,
    settle,
)
from ostinato.infra.sandbox.microvm.memory import load_pages
from ostinato.infra.sandbox.microvm.repository import compare_files
from ostinato.infra.sandbox.microvm.sandbox import MicroVmSandbox, Origin
from ostinato.infra.sandbox.microvm.templates import BootLimits, TemplateStore
from ostinato.infra.sandbox.protocol import (
    Capabilities,
    Sandbox,
    SandboxSpec,
    Snapshot,
    SnapshotKind,
)


def check_host(image_folder: Path) -> None:
    """SandboxError, naming what to install, where this host cannot run machines."""
    find_program()
    if find_image(ImageKind.PYTHON, image_folder) is None:
        check_tools()


@dataclass(frozen=True, slots=True)
class _Kept:
    """A snapshot and what its sandboxes are made of."""

    snapshot: Snapshot
    origin: Origin
    files: dict[str, bytes]
    state: MachineState  # its pages are in the file
    pages_file: Path


class MicroVmBackend:
    """Virtual machines of this host. Belongs to one event loop, and its thread must outlive it."""

    name = "microvm"

    def __init__(
        self,
        image_folder: Path,
        *,
        accelerator: Accelerator | None = None,
        boot_limits: BootLimits | None = None,
        memory_folder: Path | None = None,
    ) -> None:
        """Images are made in and found in `image_folder`; see TemplateStore for the rest."""
        find_program()
        self.templates = TemplateStore(
            image_folder,
            accelerator=accelerator,
            boot_limits=boot_limits,
            memory_folder=memory_folder,
        )
        self._numbers = itertools.count()
        self._sandboxes: dict[str, MicroVmSandbox] = {}
        self._snapshots: dict[str, _Kept] = {}

    @property
    def capabilities(self) -> Capabilities:
        """Everything: a machine's memory can be copied while it runs."""
        return Capabilities(memory_snapshot=True)

    async def create(self, spec: SandboxSpec) -> MicroVmSandbox:
        """A machine over the spec's repository and files, ready to be asked."""
        template = await self.templates.get(
            find_kind(spec.template), spec.limits.memory_bytes, spec.repository
        )
        origin = Origin(spec, template, template.repository.files)

        async def prepare(sandbox: MicroVmSandbox) -> None:
            await sandbox.open()
            await sandbox.lay_over(dict(spec.files))

        return await self._start(origin, template.state, prepare)

    async def fork(self, source: Snapshot | Sandbox, count: int = 1) -> tuple[MicroVmSandbox, ...]:
        """New machines in the state of `source`, a running one's processes included."""
        prepare = MicroVmSandbox.wake
        if isinstance(source, Snapshot):
            kept = self._kept(source)
            origin, state = kept.origin, kept.state
            if kept.pages_file.exists():
                pages = await asyncio.to_thread(load_pages, kept.pages_file)
                state = replace(state, pages=pages)
            if source.kind is SnapshotKind.FILES:
                prepare = MicroVmSandbox.open
            return await start_all(self._start(origin, state, prepare) for _ in range(count))
        sandbox = self._find(source)
        devices_file = self._new_path("devices")
        try:
            state = await sandbox.copy_state(devices_file)
            return await start_all(
                self._start(sandbox.origin, state, prepare) for _ in range(count)
            )
        finally:
            devices_file.unlink(missing_ok=True)

    async def remove_snapshot(self, snapshot: Snapshot) -> None:
        """Forget it and free its files; machines that were started from it go on."""
        kept = self._kept(snapshot)
        del self._snapshots[snapshot.snapshot_id]
        _remove_files(kept.state, kept.pages_file)

    async def close(self) -> None:
        """End every machine and free all memory."""
        for sandbox in list(self._sandboxes.values()):
            await sandbox.close()
        self._snapshots.clear()
        await self.templates.close()
        await settle()

    async def take_snapshot(self, sandbox: MicroVmSandbox, kind: SnapshotKind) -> Snapshot:
        """See MicroVmSandbox.snapshot."""
        pages_file, devices_file = self._new_path("pages"), self._new_path("devices")
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
        if state.pages is not None:
            await asyncio.to_thread(state.pages.save, pages_file)
        state = replace(state, pages=None)
        snapshot = Snapshot(snapshot_id=digest.hexdigest()[:32], kind=kind)
        known = self._snapshots.get(snapshot.snapshot_id)
        if known is not None:
            _remove_files(state, pages_file)
            return known.snapshot
        kept = _Kept(snapshot, sandbox.origin, files, state, pages_file)
        self._snapshots[snapshot.snapshot_id] = kept
        return snapshot

    def files_of(self, snapshot: Snapshot) -> dict[str, bytes]:
        """Regular files of a snapshot's repository."""
        return self._kept(snapshot).files

    def forget(self, sandbox: MicroVmSandbox) -> None:
        """Take a machine that has ended off the list."""
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

    def _kept(self, snapshot: Snapshot) -> _Kept:
        kept = self._snapshots.get(snapshot.snapshot_id)
        if kept is None:
            raise SandboxNotFound(f"no snapshot {snapshot.snapshot_id} in this backend")
        return kept

    def _new_path(self, kind: str) -> Path:
        return self.templates.folder / f"state-{next(self._numbers)}.{kind}"


def _remove_files(state: MachineState, pages_file: Path) -> None:
    pages_file.unlink(missing_ok=True)
    state.devices_file.unlink(missing_ok=True)
