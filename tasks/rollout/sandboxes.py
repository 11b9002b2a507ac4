"""Boxes of one process, for all its trajectories.

Agents' boxes may come from the sandbox fleet instead; tests are run and judged here all the same.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

from ostinato.infra.platform.cluster.stage_status import BoxUse
from ostinato.infra.platform.errors import ProblemError
from ostinato.infra.sandbox.backends import open_backend
from ostinato.infra.sandbox.environment import RepositoryEnvironment
from ostinato.infra.sandbox.protocol import Sandbox, SandboxKind
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.records import Problem
from ostinato.tasks.rollout.config import BOX_LIMITS

if TYPE_CHECKING:  # it needs Ray, which evaluations do without
    from ostinato.infra.sandbox.fleet.client import FleetClient

# more only wait for one another's processor time, until the start limit fails them
STARTS_AT_A_TIME = 4
TEST_SERVER_BYTES = 2 << 30


class Sandboxes:
    """All boxes of this process."""

    def __init__(
        self,
        repositories: Iterable[PreparedRepository],
        *,
        concurrent_trajectories: int,
        kind: SandboxKind = SandboxKind.NAMESPACE,
        fleet: "FleetClient | None" = None,
    ) -> None:
        """`fleet`: where agents' boxes come from. None: this process makes them, of this kind."""
        server = BOX_LIMITS.model_copy(update={"memory_bytes": TEST_SERVER_BYTES})
        self._backend = open_backend(kind)
        self._environments = {
            repository.name: RepositoryEnvironment(
                repository,
                self._backend,
                concurrent_trajectories,
                limits=BOX_LIMITS,
                test_limits=server,
            )
            for repository in repositories
        }
        self._starts = asyncio.Semaphore(STARTS_AT_A_TIME)
        self._fleet = fleet
        self._leased = 0
        self._numbers = itertools.count()
        self._waiting_since: dict[int, float] = {}

    def of(self, problem: Problem) -> RepositoryEnvironment:
        """The environment for a problem. ProblemError for an unknown repository."""
        environment = self._environments.get(problem.repository)
        if environment is None:
            known = ", ".join(sorted(self._environments))
            raise ProblemError(
                f"problem {problem.problem_id}: repository {problem.repository}, "
                f"wanted one of {known}"
            )
        return environment

    @asynccontextmanager
    async def leased(
        self, environment: RepositoryEnvironment, files: Mapping[str, bytes | None]
    ) -> AsyncIterator[Sandbox]:
        """A clean box with `files` laid over the repository, for the length of a block."""
        async with AsyncExitStack() as lent:
            with self._waits():
                if self._fleet is not None:
                    lease = self._fleet.leased(environment.repository, files)
                    sandbox = await lent.enter_async_context(lease)
                else:
                    async with self._starts:
                        sandbox = await environment.lease(files)
                    lent.push_async_callback(environment.release, sandbox)
            with self._uses():
                yield sandbox

    def use(self) -> BoxUse:
        """Boxes that trajectories have and wait for now."""
        waiting = self._waiting_since.values()
        return BoxUse(
            leased=self._leased, waiting=len(waiting), waiting_since=min(waiting, default=None)
        )

    @contextmanager
    def _waits(self) -> Iterator[None]:
        number = next(self._numbers)
        self._waiting_since[number] = time.time()
        try:
            yield
        finally:
            del self._waiting_since[number]

    @contextmanager
    def _uses(self) -> Iterator[None]:
        self._leased += 1
        try:
            yield
        finally:
            self._leased -= 1

    async def close(self) -> None:
        """Ends every box. Those of the fleet go back."""
        if self._fleet is not None:
            await self._fleet.close()
        for environment in self._environments.values():
            await environment.close()
        await self._backend.close()
