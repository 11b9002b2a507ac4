"""Sandboxes in which served agents work on a user's files over a known or an uploaded repository."""

import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager

from ostinato.infra.agent.environment import AgentEnvironment
from ostinato.infra.agent.search.index import SearchService
from ostinato.infra.agent.workplace import make_workplace
from ostinato.infra.platform.diffs import unified_diff
from ostinato.infra.platform.errors import ProblemError
from ostinato.infra.sandbox.discovery.collection import unloaded_plugins
from ostinato.infra.sandbox.environment import RepositoryEnvironment
from ostinato.infra.sandbox.protocol import SandboxKind
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.infra.serving.gateway.uploads.store import Uploads

logger = logging.getLogger(__name__)
Files = Mapping[str, bytes | None]
"""Path -> content that differs from the pristine repository; None: removed."""


class RepositoryWorkplaces:
    """Sandboxes by repository name: a pool of boxes and a warm test server for each repository."""

    def __init__(
        self,
        repositories: Iterable[PreparedRepository],
        *,
        boxes_per_repository: int,
        sandbox: SandboxKind = SandboxKind.NAMESPACE,
        test_limit_seconds: float,
        search: SearchService | None = None,
        uploads: Uploads | None = None,
    ) -> None:
        """`search` answers codebase_search (None: without a trained encoder)."""
        self._environments = {
            repository.name: RepositoryEnvironment.create(repository, boxes_per_repository, sandbox)
            for repository in repositories
        }
        self._test_limit_seconds = test_limit_seconds
        self._search = search or SearchService(None)
        self._uploads = uploads

    def names(self, tenant: str) -> tuple[str, ...]:
        """Repositories that a tenant may name: those of the gateway, and the tenant's own uploads."""
        uploads = () if self._uploads is None else self._uploads.store.list(tenant)
        return (*sorted(self._environments), *(upload.upload_id for upload in uploads))

    async def pristine(self, tenant: str, repository: str) -> Mapping[str, bytes]:
        """Every file as the repository has it."""
        async with self._place(tenant, repository) as place:
            return place.repository.files

    @asynccontextmanager
    async def lease(
        self, tenant: str, repository: str, files: Files, test_ids: tuple[str, ...] | None
    ) -> AsyncIterator[AgentEnvironment]:
        """A clean sandbox for one request. `pytest` in it runs `test_ids` (None: all)."""
        async with self._place(tenant, repository) as place:
            warning = ""
            if test_ids is None:
                test_ids, warning = await _collect_tests(place)
            sandbox = await place.lease(files)
            try:
                environment = make_workplace(
                    sandbox,
                    place.test_server,
                    test_ids=test_ids,
                    test_limit_seconds=self._test_limit_seconds,
                    search=self._search,
                )
                environment.warning = warning
                yield environment
            finally:
                await place.release(sandbox)

    @asynccontextmanager
    async def _place(self, tenant: str, repository: str) -> AsyncIterator[RepositoryEnvironment]:
        known = self._environments.get(repository)
        if known is not None or self._uploads is None:
            yield self._environments[repository]
            return
        async with self._uploads.place(tenant, repository) as place:
            yield place

    async def close(self) -> None:
        for place in self._environments.values():
            await place.close()


async def _collect_tests(place: RepositoryEnvironment) -> tuple[tuple[str, ...], str]:
    """Every test of a repository, and a warning if there is none or if some may fail for want of a plug-in."""
    if not place.repository.test_paths:
        return (), "no test can be run here: the repository has none"
    try:
        await place.test_server.start()
    except ProblemError as error:
        logger.warning("no_tests=%s", error)
        return (), f"no test can be run here: {error}"
    return place.test_server.tests, unloaded_plugins(place.repository.files)


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
