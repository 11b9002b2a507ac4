"""A repository as a place for attempts: boxes to work in and a warm test run, side by side.

It knows no problems and gives no rewards.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ostinato.infra.sandbox.namespace import NamespaceSandbox
from ostinato.infra.sandbox.pool import SandboxPool
from ostinato.infra.sandbox.protocol import Sandbox, TestOutcome, TestReport
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.infra.sandbox.test_server import TestServer

_MESSAGE_CHARACTERS = 80


@dataclass(frozen=True, slots=True)
class TextRegion:
    """Lines of a file that the agent has read; the first is shown as <L1>."""

    path: str
    first_line: int
    num_lines: int


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


def report_to_text(report: TestReport, region: TextRegion | None = None) -> str:
    """`passed`, or `failed: Type: message` and ` at <Ln>` for the deepest frame in `region`."""
    if report.passed:
        return "passed"
    if report.tampering:
        return "failed: the test run was tampered with"
    if report.first_failure is None:
        test, outcome = next(
            (test, value)
            for test, value in report.outcomes.items()
            if value is not TestOutcome.PASSED
        )
        return f"failed: {outcome.value} {test.rpartition('::')[2]}"
    failure = report.first_failure
    if TestOutcome.TIMEOUT is report.outcomes.get(failure.test_id):
        text = "failed: timeout"
    else:
        message = " ".join(failure.message.split())[:_MESSAGE_CHARACTERS]
        text = (
            f"failed: {failure.error_type}: {message}"
            if message
            else f"failed: {failure.error_type}"
        )
    return text + _place(report, region)


def _place(report: TestReport, region: TextRegion | None) -> str:
    if region is None or report.first_failure is None:
        return ""
    for frame in reversed(report.first_failure.frames):
        offset = frame.line_number - region.first_line
        if frame.path == region.path and 0 <= offset < region.num_lines:
            return f" at <L{offset + 1}>"
    return ""
