"""The `microvm` backend: virtual machines that start as copies of a template or of one another.

`MicroVmBackend`: which sandboxes and snapshots there are and what stands on what. A file snapshot
holds what differs from the pristine repository; a memory snapshot holds the pages a machine has
written since its template, and its devices, so that processes go on in the copy. Time comes in as a
clock; randomness for guests is the host's.
"""

import asyncio
import hashlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ostinato.infra.platform.errors import InvalidArgument, SandboxBusy, SandboxNotFound
from ostinato.infra.sandbox.host.roster import Roster, check_count, start_all
from ostinato.infra.sandbox.microvm.changes import (
    Changes,
    changes_of_files,
    compare_files,
)
from ostinato.infra.sandbox.microvm.image import find_kind
from ostinato.infra.sandbox.microvm.machine import Accelerator, Machine, MachineState, settle
from ostinato.infra.sandbox.microvm.memory import load_pages
from ostinato.infra.sandbox.microvm.sandbox import MicroVmSandbox, Origin
from ostinato.infra.sandbox.microvm.templates import BootLimits, TemplateStore
from ostinato.infra.sandbox.protocol import (
    Capabilities,
    LiveSandbox,
    SandboxSpec,
    Snapshot,
    SnapshotKind,
)


@dataclass(slots=True)
class _Kept:
    """A snapshot, what its sandboxes are made of, and how many there are."""

    snapshot: Snapshot
    origin: Origin
    state: MachineState | None  # of a memory snapshot; its pages are in the file
    pages_file: Path
    num_users: int = 0


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Images are made in and found in `image_folder`; see TemplateStore for the rest."""
        self.clock = clock
        self.templates = TemplateStore(
            image_folder,
            accelerator=accelerator,
            boot_limits=boot_limits,
            memory_folder=memory_folder,
        )
        self._numbers = itertools.count()
        self._sandboxes: Roster[MicroVmSandbox] = Roster()
        self._snapshots: dict[str, _Kept] = {}

    @property
    def capabilities(self) -> Capabilities:
        """Everything: a machine's memory can be copied while it runs."""
        return Capabilities(memory_snapshot=True, own_kernel=True, hard_limits=True)

    async def create(self, spec: SandboxSpec) -> MicroVmSandbox:
        """A machine over the spec's repository and files, ready to be asked."""
        return await self._sandboxes.create_once(spec.client_key, lambda: self._create(spec))

    async def fork(
        self, source: Snapshot | LiveSandbox, count: int = 1
    ) -> Sequence[MicroVmSandbox]:
        """New machines in the state of `source`, a running one's processes included."""
        check_count(count)
        if isinstance(source, Snapshot):
            return await self._start_from(self._kept(source), count)
        sandbox = self._sandboxes.find(source)
        devices_file = self._new_path("devices")
        try:
            changes = await sandbox.read_changes()
            state = await sandbox.copy_state(devices_file)
            origin = replace(self._copied_origin(sandbox.origin), changes=changes)
            return await self._start_all(origin, state, count)
        finally:
            devices_file.unlink(missing_ok=True)

    async def restore(self, snapshot: Snapshot) -> MicroVmSandbox:
        """One new machine in a snapshot's state."""
        return (await self._start_from(self._kept(snapshot), 1))[0]

    async def list_sandboxes(
        self, labels: Mapping[str, str] | None = None
    ) -> tuple[MicroVmSandbox, ...]:
        """Machines that carry all these labels."""
        return self._sandboxes.with_labels(labels)

    async def reap(self) -> tuple[str, ...]:
        """Close machines past their time to live and lost ones; their ids."""
        return await self._sandboxes.reap()

    async def remove_snapshot(self, snapshot: Snapshot) -> None:
        """Free its files; SandboxBusy while a sandbox or another snapshot stands on it."""
        kept = self._kept(snapshot)
        children = [
            other
            for other in self._snapshots.values()
            if other.snapshot.parent_id == snapshot.snapshot_id
        ]
        if kept.num_users or children:
            raise SandboxBusy(
                f"snapshot {snapshot.snapshot_id}: {kept.num_users} sandboxes and "
                f"{len(children)} snapshots stand on it; close them first"
            )
        del self._snapshots[snapshot.snapshot_id]
        _remove_files(kept)

    async def close(self) -> None:
        """End every machine and free all memory."""
        await self._sandboxes.close_all()
        self._snapshots.clear()
        await self.templates.close()
        await settle()

    async def take_snapshot(self, sandbox: MicroVmSandbox, kind: SnapshotKind) -> Snapshot:
        """See MicroVmSandbox.snapshot."""
        pages_file = self._new_path("pages")
        digest = hashlib.sha256(f"{kind}\n{sandbox.origin.parent_id or ''}\n".encode())
        digest.update(sandbox.origin.template.state.devices_file.name.encode())
        digest.update(changes_of_files(sandbox.spec.files).encode())
        changes = await sandbox.read_changes()
        state = None
        if kind is SnapshotKind.MEMORY:
            devices_file = self._new_path("devices")
            state = await sandbox.copy_state(devices_file)
            digest.update(devices_file.read_bytes())
            num_bytes = devices_file.stat().st_size
            if state.pages is not None:
                digest.update(state.pages.content)
                state.pages.save(pages_file)
                num_bytes += len(state.pages.content)
            state = replace(state, pages=None)
        else:
            digest.update(changes.encode())
            num_bytes = changes.num_bytes
        snapshot_id = digest.hexdigest()[:32]
        origin = replace(sandbox.origin, changes=changes)
        snapshot = Snapshot(
            snapshot_id=snapshot_id,
            kind=kind,
            parent_id=sandbox.origin.parent_id,
            num_files=changes.differing(sandbox.origin.changes),
            num_bytes=num_bytes,
        )
        kept = _Kept(snapshot, origin, state, pages_file)
        known = self._snapshots.get(snapshot_id)
        if known is not None:
            _remove_files(kept)
            return known.snapshot
        self._snapshots[snapshot_id] = kept
        return snapshot

    async def compare(
        self, sandbox: MicroVmSandbox, base: Snapshot | None
    ) -> dict[str, bytes | None]:
        """See MicroVmSandbox.diff."""
        origin = sandbox.origin if base is None else self._kept(base).origin
        if origin.template is not sandbox.origin.template or (
            origin.spec.files != sandbox.spec.files
        ):
            raise InvalidArgument(
                f"diff of {sandbox.sandbox_id}: the snapshot is of another repository or other files"
            )
        files, template = sandbox.spec.files, sandbox.origin.template

        def read_pristine(path: str) -> bytes | None:
            return files[path] if path in files else template.read_pristine(path)

        return compare_files(await sandbox.read_changes(), origin.changes, read_pristine)

    def forget(self, sandbox: MicroVmSandbox) -> None:
        """A machine has ended: it is listed no more."""
        if not self._sandboxes.remove(sandbox):
            return
        kept = self._snapshots.get(sandbox.origin.parent_id or "")
        if kept is not None:
            kept.num_users -= 1

    async def _create(self, spec: SandboxSpec) -> MicroVmSandbox:
        template = await self.templates.get(
            find_kind(spec.template), spec.limits.memory_bytes, spec.repository
        )
        return await self._start_fresh(Origin(spec, template), Changes())

    async def _start_fresh(self, origin: Origin, changes: Changes) -> MicroVmSandbox:
        """A copy of the template, opened, with changes laid over its repository."""
        sandbox, started_at = await self._start(origin, origin.template.state)
        try:
            await sandbox.open(started_at)
            if changes.entries or changes.removed:
                await sandbox.put(changes)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def _start_copy(self, origin: Origin, state: MachineState) -> MicroVmSandbox:
        sandbox, started_at = await self._start(origin, state)
        try:
            await sandbox.wake(started_at)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def _start(self, origin: Origin, state: MachineState) -> tuple[MicroVmSandbox, float]:
        started_at = time.perf_counter()
        machine = await Machine.begin(origin.template.shape, state)
        sandbox = MicroVmSandbox(self, f"microvm-{next(self._numbers)}", origin, machine)
        self._sandboxes.add(sandbox)
        if origin.parent_id in self._snapshots:
            self._snapshots[origin.parent_id].num_users += 1
        return sandbox, started_at

    async def _start_from(self, kept: _Kept, count: int) -> Sequence[MicroVmSandbox]:
        origin = replace(self._copied_origin(kept.origin), parent_id=kept.snapshot.snapshot_id)
        if kept.state is None:
            starts = (self._start_fresh(origin, origin.changes) for _ in range(count))
            return await start_all(starts)
        state = kept.state
        if kept.pages_file.exists():
            state = replace(state, pages=await asyncio.to_thread(load_pages, kept.pages_file))
        return await self._start_all(origin, state, count)

    async def _start_all(
        self, origin: Origin, state: MachineState, count: int
    ) -> Sequence[MicroVmSandbox]:
        return await start_all(self._start_copy(origin, state) for _ in range(count))

    def _copied_origin(self, origin: Origin) -> Origin:
        return replace(origin, spec=origin.spec.model_copy(update={"client_key": ""}))

    def _kept(self, snapshot: Snapshot) -> _Kept:
        kept = self._snapshots.get(snapshot.snapshot_id)
        if kept is None:
            raise SandboxNotFound(f"no snapshot {snapshot.snapshot_id} in this backend")
        return kept

    def _new_path(self, kind: str) -> Path:
        return self.templates.folder / f"state-{next(self._numbers)}.{kind}"


def _remove_files(kept: _Kept) -> None:
    kept.pages_file.unlink(missing_ok=True)
    if kept.state is not None:
        kept.state.devices_file.unlink(missing_ok=True)
