"""Where a node gets its boxes from.

The protocols `FleetBox` and `BoxMaker`, and two makers: `RepositoryBoxes` (boxes that are filled
and put back in milliseconds) and `BackendBoxes` (any `SandboxBackend`, with its snapshots). It
keeps saved states, and no list of boxes.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from pydantic import Field

from ostinato.infra.platform.errors import SandboxError
from ostinato.infra.sandbox.namespace import NamespaceSandbox
from ostinato.infra.sandbox.protocol import (
    LiveSandbox,
    SandboxBackend,
    SandboxLimits,
    SandboxRecord,
    SandboxSpec,
    Snapshot,
    SnapshotKind,
)
from ostinato.infra.sandbox.repository import PreparedRepository

_NO_TIME_TO_LIVE_SECONDS = 1e9  # the lease decides, not the backend


class SavedState(SandboxRecord):
    """A state as it travels between nodes: regular files, no processes."""

    template: str
    files: Mapping[str, bytes | None] = Field(description="against the template; None: removed")


class FleetBox(Protocol):
    """A box as a node keeps it; more operations are reached by name."""

    @property
    def is_lost(self) -> bool: ...

    async def close(self) -> None: ...


class BoxMaker(Protocol):
    """Makes boxes on this machine and keeps the states saved of them. Belongs to one event loop."""

    async def make(self, template: str) -> FleetBox:
        """A box in its template's state, that answers."""
        ...

    async def clean(self, template: str, box: Any) -> FleetBox:
        """A box in its template's state in place of one that was used; it may be the same."""
        ...

    async def save(self, state_id: str, template: str, box: Any) -> None:
        """Keep what a box holds now; the box goes on."""
        ...

    async def fork(self, state_id: str) -> FleetBox:
        """A new box in a saved state."""
        ...

    def has_state(self, state_id: str) -> bool: ...

    async def give(self, state_id: str) -> SavedState:
        """A saved state for another machine."""
        ...

    def take(self, state_id: str, state: SavedState) -> None:
        """Keep a state of another machine."""
        ...

    async def drop(self, state_id: str) -> None:
        """Free a state; forks of it go on."""
        ...


class _States:
    """Saved states by id, as files."""

    def __init__(self) -> None:
        self._states: dict[str, SavedState] = {}

    def has_state(self, state_id: str) -> bool:
        return state_id in self._states

    async def give(self, state_id: str) -> SavedState:
        state = self._states.get(state_id)
        if state is None:
            raise SandboxError(f"state {state_id} is not on this node")
        return state

    def take(self, state_id: str, state: SavedState) -> None:
        self._states[state_id] = state

    async def drop(self, state_id: str) -> None:
        self._states.pop(state_id, None)


class RepositoryBoxes(_States):
    """A `BoxMaker` whose templates are repositories."""

    def __init__(
        self, repositories: Mapping[str, PreparedRepository], limits: SandboxLimits | None = None
    ) -> None:
        super().__init__()
        self._repositories = dict(repositories)
        self._limits = limits or SandboxLimits()

    async def make(self, template: str) -> NamespaceSandbox:
        repository = _find(self._repositories, template)
        return await NamespaceSandbox.open(repository, self._limits)

    async def clean(self, template: str, box: NamespaceSandbox) -> NamespaceSandbox:
        await box.reset()
        return box

    async def save(self, state_id: str, template: str, box: NamespaceSandbox) -> None:
        self.take(state_id, SavedState(template=template, files=await box.diff()))

    async def fork(self, state_id: str) -> NamespaceSandbox:
        state = await self.give(state_id)
        box = await self.make(state.template)
        try:
            await box.reset(state.files)
        except BaseException:
            await box.close()
            raise
        return box


class BackendBoxes(_States):
    """A `BoxMaker` over a backend; states saved here are its snapshots, memory too where it can."""

    def __init__(self, backend: SandboxBackend, specs: Mapping[str, SandboxSpec]) -> None:
        super().__init__()
        self._backend = backend
        self._specs = {
            template: spec.model_copy(update={"ttl_seconds": _NO_TIME_TO_LIVE_SECONDS})
            for template, spec in specs.items()
        }
        self._snapshots: dict[str, tuple[str, Snapshot]] = {}  # state id -> template, snapshot

    async def make(self, template: str) -> LiveSandbox:
        return await self._backend.create(_find(self._specs, template))

    async def clean(self, template: str, box: LiveSandbox) -> LiveSandbox:
        new_box, _ = await asyncio.gather(self.make(template), box.close())
        return new_box

    async def save(self, state_id: str, template: str, box: LiveSandbox) -> None:
        has_memory = self._backend.capabilities.memory_snapshot
        kind = SnapshotKind.MEMORY if has_memory else SnapshotKind.FILES
        snapshot = await box.snapshot(kind)
        self._snapshots[state_id] = (template, snapshot)
        if kind is SnapshotKind.FILES:
            # taken now: later the box holds something else, and the snapshot gives no files
            self.take(state_id, SavedState(template=template, files=await box.diff()))

    async def fork(self, state_id: str) -> LiveSandbox:
        known = self._snapshots.get(state_id)
        if known is not None:
            return await self._backend.restore(known[1])
        state = await self.give(state_id)
        spec = _find(self._specs, state.template)
        return await self._backend.create(
            spec.model_copy(update={"files": {**spec.files, **state.files}})
        )

    def has_state(self, state_id: str) -> bool:
        return state_id in self._snapshots or super().has_state(state_id)

    async def drop(self, state_id: str) -> None:
        await super().drop(state_id)
        known = self._snapshots.pop(state_id, None)
        if known is not None and all(
            snapshot.snapshot_id != known[1].snapshot_id for _, snapshot in self._snapshots.values()
        ):
            await self._backend.remove_snapshot(known[1])


def _find(known: Mapping[str, Any], template: str) -> Any:
    if template not in known:
        names = ", ".join(sorted(known)) or "none"
        raise SandboxError(f"template {template} is not on this node; wanted one of: {names}")
    return known[template]
