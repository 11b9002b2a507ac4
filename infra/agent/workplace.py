"""Makes the environment of an attempt from a sandbox, its tests and the code search."""

from collections.abc import Mapping, Sequence

from ostinato.infra.agent.environment import AgentEnvironment
from ostinato.infra.agent.search.index import LocalSearch, SearchService
from ostinato.infra.agent.tools.testing import make_test_runner
from ostinato.infra.sandbox.protocol import Sandbox
from ostinato.infra.sandbox.test_server import TestServer


def make_workplace(
    sandbox: Sandbox,
    server: TestServer,
    *,
    test_ids: Sequence[str],
    test_limit_seconds: float,
    search: SearchService,
    baseline: Mapping[str, bytes] | None = None,
) -> AgentEnvironment:
    """The environment of an attempt in a sandbox of the server's repository. `baseline`: the agent's
    files, if the repository also holds others. Tests then run in a box that never held those others.
    """
    repository = server.repository
    run_tests = make_test_runner(server, test_ids, test_limit_seconds, baseline)
    return AgentEnvironment(
        sandbox,
        run_tests=run_tests if test_ids else None,
        code_search=LocalSearch(search, repository.fingerprint, repository.files),
        baseline=baseline,
    )
