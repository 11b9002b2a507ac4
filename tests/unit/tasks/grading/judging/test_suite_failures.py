"""A test of the whole suite tells of a harm only where the original passes it under the same conditions."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ostinato.infra.sandbox.protocol import TestOutcome, TestReport
from ostinato.infra.sandbox.test_server import TestServer
from ostinato.tasks.grading.judging.other_code import find_suite_failures
from tests.fakes.one_line_problem import PATH, TESTS, write_package

SOURCE = "def f():\n    return 1\n\n\ndef g():\n    return 2\n"
IN_ORDER = """from pkg import code

seen = []


def test_first():
    seen.append(code.f())


def test_second():
    assert seen == [1]
    assert code.g() == 2
"""


def test_a_broken_test_is_named_although_it_passes_only_after_another(
    runner: asyncio.Runner, tmp_path: Path
) -> None:
    server = TestServer(write_package(tmp_path, SOURCE, IN_ORDER))

    def failing(source: str) -> list[str]:
        found = find_suite_failures(server, {PATH: source.encode()}, 10.0)
        return runner.run(found)

    try:
        assert failing(SOURCE.replace("return 2", "return 1 + 1")) == []
        assert failing(SOURCE.replace("return 2", "return 3")) == [f"{TESTS}::test_second"]
    finally:
        runner.run(server.close())


OUTCOMES = {
    "p": TestOutcome.PASSED,
    "f": TestOutcome.FAILED,
    "t": TestOutcome.TIMEOUT,
}


class BusyServer(TestServer):
    """What a busy machine answers, which no real one does on demand: outcomes of tests a and b, run by run."""

    def __init__(self, original: Sequence[str], changed: Sequence[str]) -> None:
        self.tests = ("a", "b")
        self._answers = {False: list(original), True: list(changed)}

    async def run(self, files: Any, test_ids: Sequence[str], *_: Any, **__: Any) -> TestReport:
        said = dict(zip("ab", self._answers[bool(files)].pop(0), strict=True))
        outcomes = {test: OUTCOMES[said[test]] for test in test_ids}
        return TestReport(outcomes=outcomes, route="fresh", seconds=0.0)

    run_again = run


@pytest.mark.parametrize(
    ("original", "changed", "failing"),
    [
        (["pp"], ["pf", "pp"], []),
        (["pp", "pp"], ["pf", "pf"], ["b"]),
        (["pp", "pf"], ["pf", "pf"], []),  # the machine, not the change
        (["pt", "pp", "pp"], ["pf", "pf"], ["b"]),  # the first run of the original was cut short
    ],
)
async def test_failures_are_those_that_the_original_does_not_share(
    original: list[str], changed: list[str], failing: list[str]
) -> None:
    server = BusyServer(original, changed)
    assert await find_suite_failures(server, {PATH: b"changed"}, 1.0) == failing
