"""Sandboxes of known repositories, in which served agents work on the user's files."""

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from ostinato.infra.agent.environment import AgentEnvironment
from ostinato.infra.agent.search.service import SearchService
from ostinato.infra.agent.workplace import make_workplace
from ostinato.infra.platform.diffs import unified_diff
from ostinato.infra.sandbox.environment import RepositoryEnvironment
from ostinato.infra.sandbox.protocol import SandboxKind
from ostinato.infra.sandbox.repository import PreparedRepository

Files = Mapping[str, bytes | None]
"""Path -> content that differs from the pristine repository; None: removed."""


class Workplaces(Protocol):
    """Sandboxes by repository name."""

    def names(self) -> tuple[str, ...]: ...

    def pristine(self, repository: str) -> Mapping[str, bytes]:
        """Every file as the repository has it."""
        ...

    def lease(
        self, repository: str, files: Files, test_ids: tuple[str, ...] | None
    ) -> AbstractAsyncContextManager[AgentEnvironment]:
        """Clean sandbox for one request. `pytest` in it runs `test_ids` (None: all)."""
        ...


class RepositoryWorkplaces:
    """Real sandboxes: a pool of boxes and a warm test server for each repository."""

    def __init__(
        self,
        repositories: Iterable[PreparedRepository],
        *,
        boxes_per_repository: int,
        sandbox: SandboxKind = SandboxKind.NAMESPACE,
        test_limit_seconds: float,
        search: SearchService | None = None,
    ) -> None:
        """`search` answers codebase_search. None: without a trained encoder."""
        self._environments = {
            repository.name: RepositoryEnvironment.create(repository, boxes_per_repository, sandbox)
            for repository in repositories
        }
        self._test_limit_seconds = test_limit_seconds
        self._search = search or SearchService(None)

    def names(self) -> tuple[str, ...]:
        """Repositories that users may name."""
        return tuple(sorted(self._environments))

    def pristine(self, repository: str) -> Mapping[str, bytes]:
        """Every file as the repository has it."""
        return self._environments[repository].repository.files

    @asynccontextmanager
    async def lease(
        self, repository: str, files: Files, test_ids: tuple[str, ...] | None
    ) -> AsyncIterator[AgentEnvironment]:
        """Clean sandbox for one request. `pytest` in it runs `test_ids` (None: all)."""
        place = self._environments[repository]
        if test_ids is None:
            await place.test_server.start()
            test_ids = place.test_server.tests
        sandbox = await place.lease(files)
        try:
            yield make_workplace(
                sandbox,
                place.test_server,
                test_ids=test_ids,
                test_limit_seconds=self._test_limit_seconds,
                search=self._search,
            )
        finally:
            await place.release(sandbox)

    async def close(self) -> None:
        for place in self._environments.values():
            await place.close()


def changed_files(
    pristine: Mapping[str, bytes], before: Files, after: Files
) -> dict[str, bytes | None]:
    """Files that differ between two states of a repository, with their later content."""

    def content(state: Files, path: str) -> bytes | None:
        return state[path] if path in state else pristine.get(path)

    paths = sorted(before.keys() | after.keys())
    return {
        path: content(after, path)
        for path in paths
        if content(before, path) != content(after, path)
    }


def describe_changes(pristine: Mapping[str, bytes], before: Files, changed: Files) -> str:
    return "".join(
        unified_diff(path, before[path] if path in before else pristine.get(path), content)
        for path, content in changed.items()
    )
