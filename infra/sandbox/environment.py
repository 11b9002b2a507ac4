"""A repository as a place for attempts: boxes to work in and a warm test run, side by side.

It knows no problems and gives no rewards.
"""

from collections.abc import Mapping, Sequence

from ostinato.infra.sandbox.namespace import NamespaceSandbox
from ostinato.infra.sandbox.pool import SandboxPool
from ostinato.infra.sandbox.protocol import Sandbox, TestReport
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.infra.sandbox.test_server import TestServer


class RepositoryEnvironment:
    """Sandboxes and the test server of one repository. Belongs to one event loop."""

    def __init__(self, pool: SandboxPool, test_server: TestServer) -> None:
        self.pool = pool
        self.test_server = test_server

    @classmethod
    def create(cls, repository: PreparedRepository, boxes: int) -> "RepositoryEnvironment":
        """An environment with at most `boxes` sandboxes; nothing starts before it is needed."""
        return cls(SandboxPool(repository, boxes), TestServer(repository))

    @property
    def repository(self) -> PreparedRepository:
        """The pristine repository."""
        return self.pool.repository

    async def lease(self, files: Mapping[str, bytes | None] | None = None) -> NamespaceSandbox:
        """A clean sandbox with `files` laid over the pristine repository."""
        return await self.pool.lease(files)

    async def release(self, sandbox: NamespaceSandbox) -> None:
        """Give a sandbox back."""
        await self.pool.release(sandbox)

    async def run_visible_tests(self, sandbox: Sandbox, test_ids: Sequence[str]) -> TestReport:
        """Run tests on what the sandbox holds now."""
        return await self.test_server.run(await sandbox.diff(), test_ids)

    async def close(self) -> None:
        """End everything."""
        await self.pool.close()
        await self.test_server.close()
