"""Where a served agent works: a sandbox of a known repository with the user's files laid over it.

The `Workplaces` protocol, its real form `RepositoryWorkplaces` (a box pool and a test server a
repository), and what changed (`changed_files`, `unified_diff`).
"""

import difflib
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from ostinato.infra.agent.environment import AgentEnvironment
from ostinato.infra.agent.search.service import LocalSearch, SearchService
from ostinato.infra.agent.test_runner import make_test_runner
from ostinato.infra.sandbox.environment import RepositoryEnvironment
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
        """A clean sandbox for one request; `pytest` in it runs `test_ids` (None: all)."""
        ...


class RepositoryWorkplaces:
    """Real sandboxes: a pool of boxes and a warm test server for each repository. Belongs to one
    event loop.
    """

    def __init__(
        self,
        repositories: Iterable[PreparedRepository],
        *,
        boxes_per_repository: int,
        test_limit_seconds: float,
        search: SearchService | None = None,
    ) -> None:
        """`search` answers codebase_search, as in training; None: plain passages."""
        self._environments = {
            repository.name: RepositoryEnvironment.create(repository, boxes_per_repository)
            for repository in repositories
        }
        self._test_limit_seconds = test_limit_seconds
        self._search = search
        self._num_leases = 0

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
        """A clean sandbox for one request; `pytest` in it runs `test_ids` (None: all the repository
        has).
        """
        place = self._environments[repository]
        if test_ids is None:
            await place.test_server.start()
            test_ids = place.test_server.tests
        sandbox = await place.lease(files)
        self._num_leases += 1
        session_id = f"{repository}-{self._num_leases}"
        try:
            run_tests = make_test_runner(place.test_server, test_ids, self._test_limit_seconds)
            code_search = self._search_of(place.repository, session_id)
            yield AgentEnvironment(sandbox, run_tests=run_tests, code_search=code_search)
        finally:
            if self._search is not None:
                self._search.close_session(session_id)
            await place.release(sandbox)

    def _search_of(self, repository: PreparedRepository, session_id: str) -> LocalSearch | None:
        if self._search is None:
            return None
        self._search.add_repository(repository.fingerprint, repository.files)
        return LocalSearch(self._search, repository.fingerprint, session_id)

    async def close(self) -> None:
        """Ends every box."""
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


def unified_diff(pristine: Mapping[str, bytes], before: Files, changed: Files) -> str:
    """The changes as a patch; files that are not text are named only."""
    pieces: list[str] = []
    for path, content in changed.items():
        old = before[path] if path in before else pristine.get(path)
        try:
            old_lines = (old or b"").decode().splitlines(keepends=True)
            new_lines = (content or b"").decode().splitlines(keepends=True)
        except UnicodeDecodeError:
            pieces.append(f"Binary files a/{path} and b/{path} differ\n")
            continue
        names = (
            "/dev/null" if old is None else f"a/{path}",
            "/dev/null" if content is None else f"b/{path}",
        )
        for line in difflib.unified_diff(old_lines, new_lines, *names):
            pieces.append(
                line if line.endswith("\n") else line + "\n\\ No newline at end of file\n"
            )
    return "".join(pieces)
