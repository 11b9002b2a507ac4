"""Tests as an agent runs them: the `pytest` command, the test server behind it, the report."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ostinato.infra.agent.environment import RunTests
from ostinato.infra.agent.regions import Region
from ostinato.infra.agent.tools.names import PASSED
from ostinato.infra.sandbox.protocol import Sandbox, TestOutcome, TestReport
from ostinato.models.rendering.vocabulary import line_tag

if TYPE_CHECKING:  # statistics read reports, and every flow imports statistics
    from ostinato.infra.sandbox.test_server import TestServer

MESSAGE_LIMIT_CHARACTERS = 80
MAX_NAMED_TESTS = 20
TAMPERED = "the test run was tampered with"
PYTEST_PREFIXES = (["pytest"], ["python", "-m", "pytest"], ["python3", "-m", "pytest"])


def is_pytest(command: str) -> bool:
    """Whether a command line is a plain call of pytest."""
    words = command.split()
    return any(words[: len(prefix)] == prefix for prefix in PYTEST_PREFIXES)


def make_test_runner(
    server: "TestServer",
    test_ids: Sequence[str],
    time_limit_seconds: float,
    given: Mapping[str, bytes] | None = None,
) -> RunTests:
    """A function that runs named tests on a sandbox's changed files, for AgentEnvironment.

    `given`: the agent's files, if the repository also holds files that the agent must not see. Tests
    then run in a box without those files.
    """

    async def run_tests(sandbox: Sandbox) -> TestReport:
        changed = await sandbox.diff()
        if given is None:
            return await server.run(changed, test_ids, time_limit_seconds)
        return await server.run_visible(changed, given, test_ids, time_limit_seconds)

    return run_tests


def describe_report(report: TestReport, region: Region | None = None) -> str:
    """`passed`, or `failed: Error: message` with the line of the region where it arose."""
    failure = report.first_failure
    if report.passed:
        return PASSED
    if report.tampering or failure is None:
        statuses = sorted({status for status in report.outcomes.values() if status != PASSED})
        return f"failed: {' '.join(statuses) or 'no tests ran'}"
    message = " ".join(failure.message.split())
    if len(message) > MESSAGE_LIMIT_CHARACTERS:
        message = message[:MESSAGE_LIMIT_CHARACTERS].rstrip() + ".."
    text = (
        f"failed: {failure.error_type}: {message}" if message else f"failed: {failure.error_type}"
    )
    if region is not None:
        for frame in reversed(failure.frames):
            number = region.number_at(frame.line_number) if frame.path == region.path else None
            if number is not None:
                return f"{text} at {line_tag(number)}"
    return text


def did_tests_pass(command: str, result: str) -> bool | None:
    """Whether tests passed, by the result text of a command. None: the test server ran no tests for it."""
    if not is_pytest(command):
        return None
    head, _, rest = result.partition("\n")
    if head == PASSED or head.startswith("failed: "):
        return head == PASSED
    counts = re.fullmatch(r"(\d+) passed, (\d+) not", head)
    if counts is None:
        return None
    return counts[2] == "0" and not rest.startswith(TAMPERED)


def report_tests(report: TestReport) -> str:
    """Counts, the tests that did not pass, and the first failure with its place."""
    failed = [test for test, value in report.outcomes.items() if value is not TestOutcome.PASSED]
    lines = [f"{len(report.outcomes) - len(failed)} passed, {len(failed)} not"]
    if report.tampering:
        lines.append(f"{TAMPERED}: {report.tampering}")
    lines += [f"{report.outcomes[test].value} {test}" for test in failed[:MAX_NAMED_TESTS]]
    if len(failed) > MAX_NAMED_TESTS:
        lines.append(f"[{len(failed) - MAX_NAMED_TESTS} more]")
    failure = report.first_failure
    if failure is not None:
        lines.append(f"{failure.test_id}: {failure.error_type}: {failure.message}".rstrip(": "))
        lines += [f"  at {frame.path}:{frame.line_number}" for frame in failure.frames]
    return "\n".join(lines)
