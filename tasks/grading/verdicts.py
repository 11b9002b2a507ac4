"""What the tests say about the end state of an attempt.

Owns `judge`: the changed files, filtered by path, are laid over the pristine repository in the test
server's box, never in the agent's; every required test must pass by name. Also owns the scan for
constructs that attack a test runner. A failure of infrastructure travels as SandboxLost and is
never a verdict.
"""

import re
import time
from collections.abc import Mapping

from infra.errors import GradingError
from infra.sandbox.environment import report_to_text
from infra.sandbox.protocol import TestOutcome
from infra.sandbox.repository import PreparedRepository
from infra.sandbox.test_server import TestServer
from tasks.records import Problem, Verdict

# Words that no bug fix needs and that reach into the test run that judges it. One counts when the
# file gains it.
FORBIDDEN_WORDS = frozenset(
    {
        "pytest", "_pytest", "unittest", "PYTEST_CURRENT_TEST", "_exit", "_getframe",
        "currentframe", "f_back", "settrace", "setprofile", "gc", "ctypes", "atexit", "linecache",
        "__subclasses__", "__code__",
    }
)  # fmt: skip


async def judge(
    problem: Problem,
    changed_files: Mapping[str, bytes | None],
    server: TestServer,
    *,
    time_limit_seconds: float,
) -> Verdict:
    """The verdict on one end state. Changes of tests and of runner files count for nothing."""
    if problem.repository_fingerprint != server.repository.fingerprint:
        raise GradingError(
            f"problem {problem.problem_id}: proven on repository {problem.repository} with "
            f"fingerprint {problem.repository_fingerprint}, the test server holds "
            f"{server.repository.fingerprint}"
        )
    started = time.perf_counter()
    required = tuple(dict.fromkeys((*problem.fail_to_pass, *problem.pass_to_pass)))
    attacks = find_forbidden(changed_files, server.repository)
    if attacks:
        return Verdict(
            problem_id=problem.problem_id,
            passed=False,
            tests_required=len(required),
            tests_passed=0,
            outcomes=dict.fromkeys(required, TestOutcome.MISSING.value),
            detail=f"refused: the change brings {', '.join(attacks)} into product code",
            wall_seconds=time.perf_counter() - started,
        )
    report = await server.run(changed_files, required, time_limit_seconds)
    return Verdict(
        problem_id=problem.problem_id,
        passed=report.passed,
        tests_required=len(required),
        tests_passed=len(report.passed_ids),
        outcomes={test: outcome.value for test, outcome in report.outcomes.items()},
        detail=report.tampering or report_to_text(report),
        wall_seconds=time.perf_counter() - started,
    )


def find_forbidden(
    changed_files: Mapping[str, bytes | None], repository: PreparedRepository
) -> tuple[str, ...]:
    """Forbidden words that counted files have and their pristine versions have not."""
    found: set[str] = set()
    for path, content in repository.keep_editable(changed_files).items():
        if content is not None:
            found |= _words(content) - _words(repository.files.get(path, b""))
    return tuple(sorted(found & FORBIDDEN_WORDS))


def _words(text: bytes) -> set[str]:
    return set(re.findall(r"\w+", text.decode(errors="replace")))
