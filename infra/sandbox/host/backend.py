"""The `namespace` backend: bubblewrap boxes over frozen layers, with file snapshots and forks.

/repo of a box is an overlay: the repository and a layer below, and above them a host folder for the box's writes,
from which the host only copies. On hosts without overlays, /repo is a copy of the files.
"""

import asyncio
import contextlib
import hashlib
import itertools
import logging
from collections.abc import Coroutine, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ostinato.infra.platform.errors import (
    CapacityExhausted,
    InvalidArgument,
    OutOfMemory,
    SandboxNotFound,
)
from ostinato.infra.sandbox.host.box import REPOSITORY_PATH, BoxProcess, python_path
from ostinato.infra.sandbox.host.channel import BoxChannel
from ostinato.infra.sandbox.host.mounts import can_overlay
from ostinato.infra.sandbox.host.system import SITE, read_only
from ostinato.infra.sandbox.host.tools import BoxTools
from ostinato.infra.sandbox.protocol import Sandbox, SandboxSpec, Snapshot, SnapshotKind
from ostinato.infra.sandbox.snapshots.layers import (
    BYTES_PER_ENTRY,
    Entries,
    find_writes,
    measure_folder,
    read_entries,
    write_entries,
)
from ostinato.infra.sandbox.snapshots.store import (
    LayerStore,
    State,
    compare_files,
    discard_folder,
    files_of,
)

logger = logging.getLogger(__name__)
_WATCH_SECONDS = 0.5
_IDLE_BOXES_PER_CHECK = 20
_Box = TypeVar("_Box", bound=Sandbox)


class NamespaceSandbox(BoxTools):
    """One bubblewrap box over layers, created by NamespaceBackend. Belongs to its event loop."""

    def __init__(
        self,
        backend: "NamespaceBackend",
        spec: SandboxSpec,
        state: State,
        folder: Path,
        box: BoxProcess,
        copied: Entries | None,
    ) -> None:
        """`copied`: files with which its folder was filled. None: the folder is the top of an overlay."""
        self._channel = BoxChannel(box)
        super().__init__(self._channel)
        self.sandbox_id = folder.name
        self.spec = spec
        self.state = state
        self.folder = folder
        self._backend = backend
        self._box = box
        self._copied = copied
        self._ending: asyncio.Task[None] | None = None
        entries = (copied or {}).values()
        copied_bytes = sum(len(entry.content) + BYTES_PER_ENTRY for entry in entries)
        self._max_bytes = spec.limits.writable_bytes + copied_bytes

    async def snapshot(self, kind: SnapshotKind = SnapshotKind.FILES) -> Snapshot:
        """A snapshot of the files. All processes of the box are stopped while the files are read."""
        if kind is not SnapshotKind.FILES:
            raise InvalidArgument(
                f"snapshot of {self.sandbox_id}: kind {kind} is not supported, only files"
            )
        return self._backend.keep(self.spec, await self.read_state())

    async def diff(self, base: Snapshot | None = None) -> dict[str, bytes | None]:
        store, writes = self._backend.store, await self.read_writes()
        pristine = store.base(self.spec.repository)
        before = pristine if base is None else self._backend.find_snapshot(base).state

        def compare() -> dict[str, bytes | None]:
            now = files_of(store.whole(self.state, writes))
            return compare_files(files_of(store.whole(before)), now)

        return await asyncio.to_thread(compare)  # a box may have many files

    async def read_state(self) -> State:
        """The present files, from which other boxes can start."""
        return self._backend.store.with_writes(self.state, await self.read_writes())

    async def read_writes(self) -> Entries:
        """The writes of this sandbox as entries of a layer."""
        async with self.paused():
            entries = await asyncio.to_thread(read_entries, self.folder / "up", self._max_bytes)
        return entries if self._copied is None else find_writes(self._copied, entries)

    async def close(self) -> None:
        if self._ending is None:
            self._is_closed = True
            self._ending = asyncio.create_task(self._end())
        await asyncio.shield(self._ending)  # all callers, also the backend, wait for the same end

    async def _end(self) -> None:
        try:
            await self._channel.close()
            await asyncio.to_thread(discard_folder, self.folder)
        except Exception:  # the caller cannot act on it
            logger.exception("box %s did not end cleanly; trying once more", self._box.name)
            with contextlib.suppress(Exception):
                self._box.close()
            discard_folder(self.folder)
        finally:
            self._backend.forget(self)

    async def check_space(self) -> None:
        """Kills a box that wrote more than it may. Memory limits alone are not enforced on every host."""
        if self.is_lost:
            return
        limit = self._max_bytes
        try:
            written = await asyncio.to_thread(measure_folder, self.folder / "up", limit)
            entries = self._box.count_entries_in_memory() * BYTES_PER_ENTRY
        except Exception as error:  # noqa: BLE001 - no box may write unmeasured, and the watch must go on
            text = f"writes of box {self._box.name} cannot be measured: {error}"
            self._channel.lose(OutOfMemory(text))
            return
        for what, size, max_bytes in (
            ("wrote", written, limit),
            ("has entries in memory of", entries, self.spec.limits.writable_bytes),
        ):
            if size > max_bytes:
                text = f"box {self._box.name} {what} {size} bytes, at most {max_bytes} are allowed"
                self._channel.lose(OutOfMemory(text))

    @property
    def num_requests(self) -> int:
        """Number of requests so far; it grows when the box is used."""
        return self._channel.num_requests


@dataclass(frozen=True, slots=True)
class _SavedSnapshot:
    """A snapshot with the state and specification from which its sandboxes start."""

    snapshot: Snapshot
    state: State
    spec: SandboxSpec


class NamespaceBackend:
    """Boxes on this host. Belongs to one event loop, whose thread must outlive the boxes."""

    name = "namespace"
    keeps_memory = False

    def __init__(self, directory: Path | None = None, *, overlays: bool | None = None) -> None:
        """`directory`: parent folder of layers and writes. None: in memory if possible.

        `overlays`: whether /repo is an overlay. None: if the host allows it.
        """
        self.store = LayerStore(directory)
        self._has_overlays = (
            can_overlay(self.store.directory.parent) if overlays is None else overlays
        )
        self._numbers = itertools.count()
        self._checks = itertools.count()
        self._sandboxes: dict[str, NamespaceSandbox] = {}
        self._snapshots: dict[str, _SavedSnapshot] = {}
        self._watcher: asyncio.Task[None] | None = None

    async def create(self, spec: SandboxSpec) -> NamespaceSandbox:
        """A box over the spec's repository and files that answers requests."""
        if spec.template != "default":
            raise InvalidArgument(f"template {spec.template!r}: this backend has only 'default'")
        state = self.store.base(spec.repository)
        if spec.files:
            state = self.store.apply_files(state, spec.files)
        return await self._start(spec, state)

    async def fork(
        self, source: Snapshot | Sandbox, count: int = 1, spec: SandboxSpec | None = None
    ) -> tuple[NamespaceSandbox, ...]:
        """Boxes over the same files. They share the frozen layer and start concurrently. `spec`: mounts, variables and
        limits in place of the source's.
        """
        if isinstance(source, Snapshot):
            saved = self.find_snapshot(source)
            own, state = saved.spec, saved.state
        else:
            sandbox = self._find(source)
            own = sandbox.spec
            state = await sandbox.read_state()
        self.store.hold(state)
        try:
            return await start_all([self._start(spec or own, state) for _ in range(count)])
        finally:
            self.store.release(state)

    async def remove_snapshot(self, snapshot: Snapshot) -> None:
        """Removes a snapshot. Its layer is removed with the last box that uses it."""
        saved = self.find_snapshot(snapshot)
        del self._snapshots[snapshot.snapshot_id]
        self.store.release(saved.state)

    async def close(self) -> None:
        """Ends every box and removes all layers."""
        for sandbox in list(self._sandboxes.values()):
            await sandbox.close()
        if self._watcher is not None:
            self._watcher.cancel()
        self._snapshots.clear()
        self.store.close()

    def keep(self, spec: SandboxSpec, state: State) -> Snapshot:
        """Saves a state as a snapshot. Equal files give the same snapshot."""
        view = (sorted(spec.mounts.items()), sorted(spec.variables.items()), spec.import_roots)
        text = f"{state.repository}\n{state.layer_id}\n{view}"
        snapshot_id = hashlib.sha256(text.encode()).hexdigest()[:32]
        if snapshot_id not in self._snapshots:
            self.store.hold(state)
            snapshot = Snapshot(snapshot_id=snapshot_id, kind=SnapshotKind.FILES)
            self._snapshots[snapshot_id] = _SavedSnapshot(snapshot, state, spec)
        return self._snapshots[snapshot_id].snapshot

    def find_snapshot(self, snapshot: Snapshot) -> _SavedSnapshot:
        """The saved snapshot. Raises SandboxNotFound if this backend does not have it."""
        saved = self._snapshots.get(snapshot.snapshot_id)
        if saved is None:
            raise SandboxNotFound(f"no snapshot {snapshot.snapshot_id} in this backend")
        return saved

    def forget(self, sandbox: NamespaceSandbox) -> None:
        """Removes a box that has ended from the list, and releases its layer."""
        if self._sandboxes.pop(sandbox.sandbox_id, None) is not None:
            self.store.release(sandbox.state)

    async def _start(self, spec: SandboxSpec, state: State) -> NamespaceSandbox:
        folder = self.store.directory / f"b{next(self._numbers)}"
        copied = None if self._has_overlays else self.store.whole(state)
        try:
            folder.mkdir()
            mounts = self._mounts(state, folder / "up", copied)
            variables = {"PYTHONPATH": python_path(spec.import_roots, SITE), **spec.variables}
            box = BoxProcess(spec.limits, (*mounts, *_spec_mounts(spec)), environment=variables)
        except OSError as error:
            discard_folder(folder)
            raise CapacityExhausted(f"no space for one more box at {folder}: {error}") from error
        except BaseException:
            discard_folder(folder)
            raise
        sandbox = NamespaceSandbox(self, spec, state, folder, box, copied)
        self.store.hold(state)
        self._sandboxes[sandbox.sandbox_id] = sandbox
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch_space())
        try:
            await sandbox.hello(sandbox.spec.limits, sandbox.spec.limits.start_seconds)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    def _mounts(self, state: State, up: Path, copied: Entries | None) -> tuple[str, ...]:
        if copied is not None:
            write_entries(copied, up)
            return ("--bind", str(up), REPOSITORY_PATH)
        work = up.with_name("work")
        for place in (up, work):
            place.mkdir()
        lower = [
            option for path in self.store.folders(state) for option in ("--overlay-src", str(path))
        ]
        return (*lower, "--overlay", str(up), str(work), REPOSITORY_PATH)

    def _find(self, sandbox: Sandbox) -> NamespaceSandbox:
        found = self._sandboxes.get(sandbox.sandbox_id)
        if found is None or found is not sandbox:
            raise SandboxNotFound(f"no sandbox {sandbox.sandbox_id} in this backend")
        return found

    async def _watch_space(self) -> None:
        """Checks the boxes used since the last check, and some of the others in turn."""
        seen: dict[str, int] = {}
        while self._sandboxes:
            await asyncio.sleep(_WATCH_SECONDS)
            boxes = list(self._sandboxes.values())
            used = [box for box in boxes if seen.get(box.sandbox_id) != box.num_requests]
            idle = [box for box in boxes if box not in used]
            first = next(self._checks) * _IDLE_BOXES_PER_CHECK % max(len(idle), 1)
            seen = {box.sandbox_id: box.num_requests for box in boxes}
            for box in (*used, *idle[first : first + _IDLE_BOXES_PER_CHECK]):
                await box.check_space()
        self._watcher = None


def _spec_mounts(spec: SandboxSpec) -> Iterator[str]:
    """Bubblewrap arguments for the spec's mounts. Folders become overlays where possible. Only sockets are bound,
    because boxes could signal to each other with locks on other files of the host.
    """
    for target, source in spec.mounts.items():
        is_socket = source.is_socket()
        yield from ("--ro-bind", str(source), target) if is_socket else read_only(source, target)


async def start_all(starts: Iterable[Coroutine[Any, Any, _Box]]) -> tuple[_Box, ...]:
    """All sandboxes, started concurrently. If one fails, the others are closed and its error is raised."""
    started = await asyncio.gather(*starts, return_exceptions=True)
    failures = [item for item in started if isinstance(item, BaseException)]
    boxes = tuple(item for item in started if not isinstance(item, BaseException))
    if failures:
        for box in boxes:
            await box.close()
        raise failures[0]
    return boxes
