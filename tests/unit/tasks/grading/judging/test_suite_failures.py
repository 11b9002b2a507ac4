"""The whole suite is a harm's witness only where the original passes it under the same conditions."""

from collections.abc import Mapping, Sequence

import pytest

from ostinato.infra.sandbox.protocol import TestOutcome, TestReport
from ostinato.infra.sandbox.test_server import TestServer
from ostinato.tasks.grading.judging.other_code import find_suite_failures

CHANGED = {"pkg/code.py": b"changed"}
FAILED, MISSING, PASSED = TestOutcome.FAILED, TestOutcome.MISSING, TestOutcome.PASSED


class ScriptedServer(TestServer):
    """Answers by a script: outcomes of the tests a and b, first of the original, then of the change."""

    def __init__(self, original: Sequence[str], changed: Sequence[str]) -> None:
        self.tests = ("a", "b")
        self._answers = {False: list(original), True: list(changed)}

    async def run(
        self,
        files: Mapping[str, bytes | None],
        test_ids: Sequence[str],
        time_limit_seconds: float = 10.0,
    ) -> TestReport:
        said = self._answers[bool(files)].pop(0)
        outcome = {"p": PASSED, "f": FAILED, "m": MISSING}
        known = {test: outcome[letter] for test, letter in zip("ab", said, strict=True)}
        return TestReport(
            outcomes={test: known[test] for test in test_ids}, route="fresh", seconds=0.0
        )

    run_again = run


@pytest.mark.parametrize(
    ("original", "changed", "failing"),
    [
        (["pp"], ["pp"], []),
        (["pp"], ["pf", "pp"], []),
        (["pp", "pp"], ["pf", "pf"], ["b"]),
        (["pp", "pf"], ["pf", "pf"], []),  # the machine, not the change
        (["pm", "pp", "pp"], ["pf", "pf"], ["b"]),  # the first run was cut short
        (["pf"], ["pf"], []),
    ],
)
async def test_failures_are_those_that_the_original_does_not_share(
    original: list[str], changed: list[str], failing: list[str]
) -> None:
    assert await find_suite_failures(ScriptedServer(original, changed), CHANGED, 1.0) == failing
