"""Boxes of one process, for all its trajectories.

The sandbox fleet may provide agents' boxes instead. This process still runs and judges the tests.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.environment import AgentEnvironment
from ostinato.infra.agent.search.index import SearchService
from ostinato.infra.agent.workplace import make_workplace
from ostinato.infra.platform.cluster.stage_status import BoxUse
from ostinato.infra.platform.errors import ProblemError
from ostinato.infra.sandbox.backends import open_backend
from ostinato.infra.sandbox.egress.config import NetworkRequest
from ostinato.infra.sandbox.egress.door import Door, Doors
from ostinato.infra.sandbox.environment import RepositoryEnvironment
from ostinato.infra.sandbox.protocol import Sandbox, SandboxKind, SandboxLimits
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.records import Problem
from ostinato.tasks.rollout.config import BOX_LIMITS

if TYPE_CHECKING:  # it imports Ray, which evaluations do not need
    from ostinato.infra.sandbox.fleet.client import FleetClient

# More starts at a time would compete for processor time until the start limit fails them.
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
        limits: SandboxLimits = BOX_LIMITS,
        mounts: Mapping[str, Path] | None = None,
        doors: Doors | None = None,
    ) -> None:
        """`fleet` provides agents' boxes. None: this process makes them with `kind`, `limits` and `mounts` of the host.
        `doors`: network of agents' boxes; None: they have none.
        """
        server = BOX_LIMITS.model_copy(update={"memory_bytes": TEST_SERVER_BYTES})
        self._backend = open_backend(kind)
        self._environments = {
            repository.name: RepositoryEnvironment(
                repository,
                self._backend,
                concurrent_trajectories,
                limits=limits,
                test_limits=server,
                mounts=mounts,
            )
            for repository in repositories
        }
        self._starts = asyncio.Semaphore(STARTS_AT_A_TIME)
        self._fleet = fleet
        self._doors = doors
        self._leased = 0
        self._numbers = itertools.count()
        self._waiting_since: dict[int, float] = {}

    def workplace(
        self,
        problem: Problem,
        sandbox: Sandbox,
        broken: Mapping[str, bytes],
        harness: HarnessConfig,
        search: SearchService,
    ) -> AgentEnvironment:
        """The environment of an agent in its box. `broken`: files that differ from the repository at the start."""
        boxes = self.of(problem)
        return make_workplace(
            sandbox,
            boxes.test_server,
            test_ids=problem.visible_tests,
            test_limit_seconds=harness.call_time_limit_seconds,
            search=search,
            baseline={**boxes.repository.files, **broken},
        )

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
        self,
        environment: RepositoryEnvironment,
        files: Mapping[str, bytes | None],
        door: Door | None = None,
    ) -> AsyncIterator[Sandbox]:
        """A clean box for the length of a block. `files` replace or extend those of the repository. `door`: its
        network; None: it has none.
        """
        async with AsyncExitStack() as stack:
            with self._waits():
                if self._fleet is not None:
                    lease = self._fleet.leased(environment.repository, files)
                    sandbox = await stack.enter_async_context(lease)
                else:
                    async with self._starts:
                        sandbox = await environment.lease(files, door=door)
                    stack.push_async_callback(environment.release, sandbox)
                    if door is not None:
                        await stack.enter_async_context(door.forwarded(sandbox))
            with self._uses():
                yield sandbox

    @asynccontextmanager
    async def network(
        self, problem: Problem, attempt: str, requests: list[NetworkRequest]
    ) -> AsyncIterator[Door | None]:
        """The network of an attempt's box for the length of a block, which adds to `requests`. None: the settings allow
        none.
        """
        if self._doors is None:
            yield None
            return
        own = self.of(problem).repository.own_packages
        async with self._doors.open(attempt, own, requests) as door:
            yield door

    def use(self) -> BoxUse:
        """Boxes that trajectories use or wait for now."""
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
        """Ends every box. Boxes of the fleet are returned to it."""
        if self._fleet is not None:
            await self._fleet.close()
        for environment in self._environments.values():
            await environment.close()
        await self._backend.close()
        if self._doors is not None:
            self._doors.close()
