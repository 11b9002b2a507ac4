"""Where a node gets its boxes from.

Owns the protocols `FleetBox` and `BoxMaker` and `RepositoryBoxes`, which makes namespace boxes of
prepared repositories and saves their states as changed files. Enters: template names and state
ids. Leaves: boxes that answer. It keeps no list of boxes.
"""

from collections.abc import Mapping
from typing import Protocol

from infra.errors import SandboxError
from infra.sandbox.namespace import NamespaceSandbox
from infra.sandbox.protocol import Sandbox, SandboxLimits
from infra.sandbox.repository import PreparedRepository

SavedState = tuple[str, dict[str, bytes | None]]  # template, files that differ from it


class FleetBox(Sandbox, Protocol):
    """A box as a node keeps it."""

    @property
    def is_lost(self) -> bool: ...


class BoxMaker(Protocol):
    """Makes boxes on this machine. Belongs to one event loop."""

    async def make(self, template: str) -> FleetBox:
        """A box in its template's state, that answers."""
        ...

    async def save(self, template: str, box: FleetBox) -> SavedState:
        """What another box needs to go on from where this one is; it goes on too."""
        ...

    async def fork(self, state: SavedState) -> FleetBox:
        """A new box in a saved state."""
        ...


class RepositoryBoxes:
    """A `BoxMaker` whose templates are repositories."""

    def __init__(
        self, repositories: Mapping[str, PreparedRepository], limits: SandboxLimits | None = None
    ) -> None:
        self._repositories = dict(repositories)
        self._limits = limits or SandboxLimits()

    async def make(self, template: str) -> FleetBox:
        repository = self._repositories.get(template)
        if repository is None:
            known = ", ".join(sorted(self._repositories)) or "none"
            raise SandboxError(f"template {template} is not on this node; wanted one of: {known}")
        return await NamespaceSandbox.open(repository, self._limits)

    async def save(self, template: str, box: FleetBox) -> SavedState:
        return template, await box.diff()

    async def fork(self, state: SavedState) -> FleetBox:
        template, files = state
        box = await self.make(template)
        try:
            await box.reset(files)
        except BaseException:
            await box.close()
            raise
        return box
