"""Where a node gets its boxes from."""

from collections.abc import Mapping
from typing import Protocol

from ostinato.infra.platform.errors import SandboxError
from ostinato.infra.sandbox.backends import SandboxKind, open_backend
from ostinato.infra.sandbox.protocol import Sandbox, SandboxLimits, SandboxSpec
from ostinato.infra.sandbox.repository import PreparedRepository


class FleetBox(Protocol):
    """A box as a node keeps it. More operations are reached by name."""

    @property
    def is_lost(self) -> bool: ...

    async def close(self) -> None: ...


class BoxMaker(Protocol):
    """Makes boxes on this machine. Belongs to one event loop."""

    async def make(self, template: str) -> FleetBox:
        """A box in its template's state, that answers."""
        ...


class RepositoryBoxes:
    """A `BoxMaker` whose templates are repositories."""

    def __init__(
        self,
        repositories: Mapping[str, PreparedRepository],
        limits: SandboxLimits | None = None,
        kind: SandboxKind = SandboxKind.NAMESPACE,
    ) -> None:
        self._repositories = dict(repositories)
        self._limits = limits or SandboxLimits()
        self._backend = open_backend(kind)

    async def make(self, template: str) -> Sandbox:
        repository = self._repositories.get(template)
        if repository is None:
            names = ", ".join(sorted(self._repositories)) or "none"
            raise SandboxError(f"template {template} is not on this node; wanted one of: {names}")
        return await self._backend.create(
            SandboxSpec(repository=repository.directory, limits=self._limits)
        )
