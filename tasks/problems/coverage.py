"""Which tests speak of which function: measured on the pristine repository in the sandbox.

Owns `TestMap`. Only tests that pass twice and are fast take part. Enters: a test server. Leaves:
test ids by function, the most telling first.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from infra.errors import ProblemError
from infra.sandbox.protocol import TestOutcome
from infra.sandbox.test_server import TestProbe, TestServer
from tasks.problems.config import ProblemsConfig
from tasks.problems.functions import Function


@dataclass(frozen=True)
class TestMap:
    """Stable fast tests of one repository and what each calls."""

    __test__ = False

    probes: dict[str, TestProbe]
    num_tests: int

    def tests_for(self, function: Function, most: int) -> tuple[str, ...]:
        """Tests that call the function: named after it first, then those that call the fewest
        others.
        """
        place = (function.path, function.first_line, function.name)
        calling = [test for test, probe in self.probes.items() if place in probe.called]
        calling.sort(
            key=lambda test: (not _names(test, function.name), len(self.probes[test].called), test)
        )
        return tuple(calling[:most])

    def neighbours(self, tests: Iterable[str], function: Function) -> tuple[str, ...]:
        """Tests of the same files that do not call the function."""
        place = (function.path, function.first_line, function.name)
        files = {test.partition("::")[0] for test in tests}
        return tuple(
            test
            for test, probe in self.probes.items()
            if test.partition("::")[0] in files and place not in probe.called
        )


async def map_tests(server: TestServer, config: ProblemsConfig) -> TestMap:
    """Run everything once plain and once profiled.

    Keep what passed both times and is fast enough.
    """
    await server.start()
    timed = await server.probe(server.tests, 20 * config.time_limit_seconds, profile=False)
    candidates = [
        test
        for test, probe in timed.items()
        if probe.outcome is TestOutcome.PASSED and probe.seconds <= config.max_test_seconds
    ]
    profiled = await server.probe(candidates, 20 * config.time_limit_seconds)
    stable = {
        test: probe for test, probe in profiled.items() if probe.outcome is TestOutcome.PASSED
    }
    if not stable:
        raise ProblemError(
            f"repository {server.repository.name}: none of {len(server.tests)} tests passes twice "
            f"within {config.max_test_seconds} s"
        )
    return TestMap(stable, len(server.tests))


def _names(test: str, function: str) -> bool:
    words = re.split(r"[^a-z0-9]+", test.partition("::")[2].lower())
    text = "".join(words)
    return function.lower().replace("_", "") in text
