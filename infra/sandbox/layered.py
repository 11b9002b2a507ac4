"""The `namespace` backend: bubblewrap boxes over frozen layers, with file snapshots and forks.

`NamespaceBackend` and `LayeredSandbox`, the protocols of protocol.py on boxes whose /repo is an
overlay: repository and layers below, the sandbox's own writes in a host folder above, which is only
ever copied. It runs no tests and gives no rewards.
"""

import asyncio
import hashlib
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ostinato.infra.platform.errors import (
    CapacityExhausted,
    InvalidArgument,
    OutOfMemory,
    SandboxBusy,
    SandboxNotFound,
)
from ostinato.infra.sandbox.box import STATIC_SERVER, BoxProcess
from ostinato.infra.sandbox.channel import BoxChannel
from ostinato.infra.sandbox.layer_store import LayerStore, Stack
from ostinato.infra.sandbox.layers import Entries, measure_folder, read_entries, remove_folder
from ostinato.infra.sandbox.protocol import (
    Capabilities,
    LiveSandbox,
    SandboxSpec,
    SandboxStats,
    Snapshot,
    SnapshotKind,
)
from ostinato.infra.sandbox.roster import Lifetime, Roster, check_count, start_all
from ostinato.infra.sandbox.system import has_static_agent
from ostinato.infra.sandbox.tools import FILE_SECONDS, BoxTools

_WATCH_SECONDS = 0.5
_IDLE_BOXES_A_LOOK = 20
_PYTHON_SERVER = "file_server"


@dataclass(slots=True)
class _Kept:
    """A snapshot's files and what its sandboxes are made of."""

    snapshot: Snapshot
    stack: Stack
    spec: SandboxSpec
    is_implicit: bool  # made for a fork of a running box: goes with the last of its users
    num_users: int = 0


class LayeredSandbox(BoxTools):
    """One box over layers. Made by NamespaceBackend; belongs to its event loop."""

    def __init__(
        self,
        backend: "NamespaceBackend",
        spec: SandboxSpec,
        stack: Stack,
        parent_id: str | None,
        folder: Path,
        box: BoxProcess,
    ) -> None:
        self._channel = BoxChannel(box)
        super().__init__(self._channel)
        self.sandbox_id = folder.name
        self.spec = spec
        self.stack = stack
        self.parent_id = parent_id
        self.folder = folder
        self._backend = backend
        self._box = box
        self._lifetime = Lifetime(backend.clock, spec.ttl_seconds)
        self._reading = asyncio.Lock()
        self._is_closed = False

    @property
    def capabilities(self) -> Capabilities:
        """Those of the backend."""
        return self._backend.capabilities

    @property
    def is_expired(self) -> bool:
        """Whether its time to live is over."""
        return self._lifetime.is_over

    def count_memory_kills(self) -> int:
        """How often the kernel ended a process of this box for memory."""
        return self._box.count_memory_kills()

    async def hello(self) -> None:
        """Wait until the box's server answers."""
        limits = self.spec.limits
        await self.channel.request(
            "hello",
            limits.start_seconds,
            process_memory_bytes=limits.process_memory_bytes,
            processes=limits.processes,
        )

    async def snapshot(self, kind: SnapshotKind = SnapshotKind.FILES) -> Snapshot:
        """Freeze the files as they are now; processes stand still meanwhile and go on after."""
        return await self._backend.take_snapshot(self, kind)

    async def diff(self, base: Snapshot | None = None) -> dict[str, bytes | None]:
        """Regular files of /repo that differ from `base` (None: as created); None: removed."""
        return await self._backend.compare(self, base)

    async def read_writes(self) -> Entries:
        """What this sandbox has written, as a layer's entries."""
        async with self._reading:
            await self.channel.request("pause", FILE_SECONDS)
            try:
                return await asyncio.to_thread(read_entries, self.folder / "up")
            finally:
                await self.channel.request("resume", FILE_SECONDS)

    async def stats(self) -> SandboxStats:
        """What the box uses now; memory, CPU and processes only where control groups count."""
        memory_bytes, cpu_seconds, num_processes = self._box.usage()
        return SandboxStats(
            memory_bytes=memory_bytes,
            cpu_seconds=cpu_seconds,
            num_processes=num_processes,
            written_bytes=measure_folder(self.folder / "up"),
            expires_in_seconds=self._lifetime.left_seconds,
        )

    async def renew(self, ttl_seconds: float | None = None) -> None:
        """Count the time to live from now; None: as long as the spec said."""
        self._lifetime.renew(ttl_seconds)

    async def close(self) -> None:
        """End the box and free what it wrote. A second close does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        await self._channel.close()
        self._backend.forget(self)
        remove_folder(self.folder)

    def check_space(self) -> None:
        """End a box that wrote more than it may: memory limits alone do not hold everywhere."""
        limit = self.spec.limits.writable_bytes
        written = measure_folder(self.folder / "up")
        if written > limit and not self.is_lost:
            why = f"box {self._box.name} wrote {written} bytes, at most {limit} are allowed"
            self._channel.lose(OutOfMemory(why))

    @property
    def num_requests(self) -> int:
        """How many requests it has had, so that one can tell whether it was used."""
        return self._channel.num_requests


class NamespaceBackend:
    """Boxes of this host. Belongs to one event loop, and its thread must outlive it."""

    name = "namespace"

    def __init__(
        self,
        *,
        server: str | None = None,
        directory: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`server` None: the static one where a compiler is, else the one in Python.

        `directory`: where layers and writes go; None: in memory where that works.
        """
        self.clock = clock
        self.store = LayerStore(directory)
        self.server = server or (STATIC_SERVER if has_static_agent() else _PYTHON_SERVER)
        self._numbers = itertools.count()
        self._looks = itertools.count()
        self._sandboxes: Roster[LayeredSandbox] = Roster()
        self._snapshots: dict[str, _Kept] = {}
        self._has_hard_limits = True
        self._watcher: asyncio.Task[None] | None = None

    @property
    def capabilities(self) -> Capabilities:
        """Files only: processes are not kept by this backend's snapshots."""
        return Capabilities(
            file_snapshot=True, fork=True, live_fork=True, hard_limits=self._has_hard_limits
        )

    async def create(self, spec: SandboxSpec) -> LayeredSandbox:
        """A box over the spec's repository and files, ready to be asked."""
        return await self._sandboxes.create_once(spec.client_key, lambda: self._create(spec))

    async def fork(
        self, source: Snapshot | LiveSandbox, count: int = 1
    ) -> tuple[LayeredSandbox, ...]:
        """Boxes over the same files; they share the frozen layers and start side by side."""
        check_count(count)
        if isinstance(source, Snapshot):
            return await self._start_from(self._kept(source), count)
        kept = await self._keep(self._sandboxes.find(source), is_implicit=True)
        try:
            return await self._start_from(kept, count)
        finally:
            self._drop_if_over(kept)

    async def restore(self, snapshot: Snapshot) -> LayeredSandbox:
        """One new box over a snapshot's files."""
        return (await self._start_from(self._kept(snapshot), 1))[0]

    async def list_sandboxes(
        self, labels: Mapping[str, str] | None = None
    ) -> tuple[LayeredSandbox, ...]:
        """Boxes that carry all these labels."""
        return self._sandboxes.with_labels(labels)

    async def reap(self) -> tuple[str, ...]:
        """Close boxes past their time to live and lost ones; their ids."""
        return await self._sandboxes.reap()

    async def remove_snapshot(self, snapshot: Snapshot) -> None:
        """Free its layers, as far as nothing else stands on them."""
        kept = self._kept(snapshot)
        if kept.num_users:
            raise SandboxBusy(
                f"snapshot {snapshot.snapshot_id}: {kept.num_users} sandboxes or snapshots "
                "stand on it; close them first"
            )
        self._drop(kept)

    async def close(self) -> None:
        """End every box and remove all layers."""
        await self._sandboxes.close_all()
        if self._watcher is not None:
            self._watcher.cancel()
        self._snapshots.clear()
        self.store.close()

    async def take_snapshot(self, sandbox: LayeredSandbox, kind: SnapshotKind) -> Snapshot:
        """See LayeredSandbox.snapshot."""
        if kind is not SnapshotKind.FILES:
            raise InvalidArgument(
                f"snapshot of {sandbox.sandbox_id}: kind {kind}, this backend keeps only files"
            )
        kept = await self._keep(sandbox, is_implicit=False)
        return kept.snapshot

    async def compare(
        self, sandbox: LayeredSandbox, base: Snapshot | None
    ) -> dict[str, bytes | None]:
        """See LayeredSandbox.diff."""
        before = sandbox.stack if base is None else self._kept(base).stack
        return self.store.compare(before, sandbox.stack, await sandbox.read_writes())

    def forget(self, sandbox: LayeredSandbox) -> None:
        """A box has ended: nothing of it is listed or held any more."""
        if not self._sandboxes.remove(sandbox):
            return
        self.store.let_go(sandbox.stack)
        kept = self._snapshots.get(sandbox.parent_id or "")
        if kept is not None:
            kept.num_users -= 1
            self._drop_if_over(kept)

    async def _create(self, spec: SandboxSpec) -> LayeredSandbox:
        if spec.template != "default":
            raise InvalidArgument(f"template {spec.template!r}: this backend has only 'default'")
        stack = self.store.base(spec.repository)
        if spec.files:
            stack = self.store.lay_over(stack, spec.files)
        return await self._start(spec, stack, None)

    async def _start_from(self, kept: _Kept, count: int) -> tuple[LayeredSandbox, ...]:
        spec = kept.spec.model_copy(update={"client_key": ""})
        return await start_all(
            self._start(spec, kept.stack, kept.snapshot.snapshot_id) for _ in range(count)
        )

    async def _start(
        self, spec: SandboxSpec, stack: Stack, parent_id: str | None
    ) -> LayeredSandbox:
        folder = self.store.directory / f"b{next(self._numbers)}"
        try:
            box = self._start_box(spec, stack, folder)
        except OSError as error:
            remove_folder(folder)
            raise CapacityExhausted(f"no room for one more box at {folder}: {error}") from error
        except BaseException:
            remove_folder(folder)
            raise
        sandbox = LayeredSandbox(self, spec, stack, parent_id, folder, box)
        self._has_hard_limits = box.has_hard_limits
        self.store.hold(stack)
        self._sandboxes.add(sandbox)
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch_space())
        if parent_id in self._snapshots:
            self._snapshots[parent_id].num_users += 1
        try:
            await sandbox.hello()
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    def _start_box(self, spec: SandboxSpec, stack: Stack, folder: Path) -> BoxProcess:
        lower = self.store.lower_folders(stack)
        for place in (folder, folder / "up", folder / "work"):
            place.mkdir()
        sources = [argument for path in lower for argument in ("--overlay-src", str(path))]
        mounts = (*sources, "--overlay", str(folder / "up"), str(folder / "work"), "/repo")
        return BoxProcess(
            self.server, spec.limits, repository_mounts=mounts, environment=spec.environment
        )

    def _kept(self, snapshot: Snapshot) -> _Kept:
        kept = self._snapshots.get(snapshot.snapshot_id)
        if kept is None:
            raise SandboxNotFound(f"no snapshot {snapshot.snapshot_id} in this backend")
        return kept

    async def _keep(self, sandbox: LayeredSandbox, *, is_implicit: bool) -> _Kept:
        entries = await sandbox.read_writes()
        stack = self.store.squash(sandbox.stack.with_layer(self.store.add(entries)))
        text = "\n".join((str(stack.repository), sandbox.parent_id or "", *stack.layer_ids))
        snapshot_id = hashlib.sha256(text.encode()).hexdigest()[:32]
        kept = self._snapshots.get(snapshot_id)
        if kept is None:
            snapshot = Snapshot(
                snapshot_id=snapshot_id,
                kind=SnapshotKind.FILES,
                parent_id=sandbox.parent_id,
                num_files=len(entries),
                num_bytes=sum(len(entry.content) for entry in entries.values()),
                num_layers=len(stack.layer_ids),
            )
            self.store.hold(stack)
            kept = _Kept(snapshot, stack, sandbox.spec, is_implicit)
            self._snapshots[snapshot_id] = kept
        kept.is_implicit = kept.is_implicit and is_implicit
        return kept

    def _drop_if_over(self, kept: _Kept) -> None:
        if kept.is_implicit and kept.num_users == 0:
            self._drop(kept)

    async def _watch_space(self) -> None:
        """Look at boxes that were used since the last look, and at some of the others in turn."""
        seen: dict[str, int] = {}
        while self._sandboxes:
            await asyncio.sleep(_WATCH_SECONDS)
            boxes = list(self._sandboxes)
            used = [box for box in boxes if seen.get(box.sandbox_id) != box.num_requests]
            idle = [box for box in boxes if box not in used]
            first = next(self._looks) * _IDLE_BOXES_A_LOOK % max(len(idle), 1)
            seen = {box.sandbox_id: box.num_requests for box in boxes}
            for box in (*used, *idle[first : first + _IDLE_BOXES_A_LOOK]):
                box.check_space()
        self._watcher = None

    def _drop(self, kept: _Kept) -> None:
        del self._snapshots[kept.snapshot.snapshot_id]
        self.store.let_go(kept.stack)
