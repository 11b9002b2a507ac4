"""A sandbox made into the place of one attempt: its tests and its code search."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from ostinato.infra.agent.environment import AgentEnvironment
from ostinato.infra.agent.search.service import LocalSearch, SearchService
from ostinato.infra.agent.tools.testing import make_test_runner
from ostinato.infra.sandbox.protocol import Sandbox
from ostinato.infra.sandbox.test_server import TestServer


@contextmanager
def open_workplace(
    sandbox: Sandbox,
    server: TestServer,
    *,
    test_ids: Sequence[str],
    test_limit_seconds: float,
    search: SearchService | None,
    session_id: str,
    baseline: Mapping[str, bytes] | None = None,
) -> Iterator[AgentEnvironment]:
    """The environment for the length of the block. `search` None: plain passages."""
    code_search = None
    if search is not None:
        repository = server.repository
        search.add_repository(repository.fingerprint, repository.files)
        code_search = LocalSearch(search, repository.fingerprint, session_id)
    try:
        yield AgentEnvironment(
            sandbox,
            run_tests=make_test_runner(server, test_ids, test_limit_seconds) if test_ids else None,
            code_search=code_search,
            baseline=baseline,
        )
    finally:
        if search is not None:
            search.close_session(session_id)
