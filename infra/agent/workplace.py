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
    search: SearchService,
    session_id: str,
    baseline: Mapping[str, bytes] | None = None,
) -> Iterator[AgentEnvironment]:
    """The environment for the length of the block."""
    repository = server.repository
    try:
        yield AgentEnvironment(
            sandbox,
            run_tests=make_test_runner(server, test_ids, test_limit_seconds) if test_ids else None,
            code_search=LocalSearch(search, repository.fingerprint, repository.files, session_id),
            baseline=baseline,
        )
    finally:
        search.close_session(session_id)
