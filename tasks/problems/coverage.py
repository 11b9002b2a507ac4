"""Which tests speak of which function: measured on the pristine repository in the sandbox.

Only tests that pass twice and are cheap take part.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ostinato.infra.platform.errors import ProblemError
from ostinato.infra.sandbox.protocol import TestOutcome
from ostinato.infra.sandbox.test_server import TestProbe, TestServer
from ostinato.tasks.problems.config import ProblemsConfig
from ostinato.tasks.problems.functions import Function


@dataclass(frozen=True)
class TestMap:
    """Stable cheap tests of one repository and what each calls."""

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
    """Run everything once plain and once profiled; keep what passed both times and is cheap."""
    await server.start()
    limit = 20 * config.time_limit_seconds
    plain = await server.probe(server.tests, limit, profile=False)
    candidates = [test for test, probe in plain.items() if probe.outcome is TestOutcome.PASSED]
    profiled = await server.probe(candidates, limit)
    stable = {
        test: probe
        for test, probe in profiled.items()
        if probe.outcome is TestOutcome.PASSED
        and probe.num_calls <= config.max_test_calls
        and plain[test].idle_seconds <= config.max_idle_seconds
    }
    if not stable:
        raise ProblemError(
            f"repository {server.repository.name}: none of {len(server.tests)} tests passes twice "
            f"with at most {config.max_test_calls} calls"
        )
    return TestMap(stable, len(server.tests))


def _names(test: str, function: str) -> bool:
    words = re.split(r"[^a-z0-9]+", test.partition("::")[2].lower())
    text = "".join(words)
    return function.lower().replace("_", "") in text
