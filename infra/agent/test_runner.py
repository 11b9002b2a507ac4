"""What `pytest` means to an agent: named tests of a test server on the sandbox's changed files."""

from collections.abc import Sequence

from ostinato.infra.agent.environment import RunTests
from ostinato.infra.sandbox.protocol import Sandbox, TestReport
from ostinato.infra.sandbox.test_server import TestServer


def make_test_runner(
    server: TestServer, test_ids: Sequence[str], time_limit_seconds: float
) -> RunTests:
    """A test runner for AgentEnvironment."""

    async def run_tests(sandbox: Sandbox) -> TestReport:
        return await server.run(await sandbox.diff(), test_ids, time_limit_seconds)

    return run_tests
