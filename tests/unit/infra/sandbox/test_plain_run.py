"""The second runner agrees with the warm test server about tests that go on after a failed part."""

import asyncio
from pathlib import Path

from ostinato.infra.sandbox.plain_run import run_plainly
from ostinato.infra.sandbox.protocol import TestOutcome
from ostinato.infra.sandbox.test_server import TestServer
from tests.fakes.one_line_problem import PATH, TESTS, make_one_line_problem

PARTS = """import unittest
from pkg.code import double


class DoubleTests(unittest.TestCase):
    def test_parts(self):
        for number in (0, 1):
            with self.subTest("a - part", number=number):
                self.assertEqual(double(number), 2 * number)

    def test_one(self):
        self.assertEqual(double(0), 0)


def test_fixture(subtests):
    for number in (0, 1):
        with subtests.test("a - part", number=number):
            assert double(number) == 2 * number
"""
NAMES = ("DoubleTests::test_parts", "DoubleTests::test_one", "test_fixture")


def test_a_failed_subtest_fails_its_test(tmp_path: Path) -> None:
    right = "    return 2 * number"
    source, edit = f"def double(number):\n{right}\n", (right, "    return number ** 2")
    repository, problem = make_one_line_problem(
        tmp_path, source, PARTS, edit, symbol="double", failing=NAMES[0]
    )
    tests = [f"{TESTS}::{name}" for name in NAMES]
    broken = problem.break_files(repository.files)
    assert PATH in broken

    async def run() -> list[dict[str, TestOutcome]]:
        server = TestServer(repository)
        try:
            reports = [await server.run(broken, tests, 60.0)]
        finally:
            await server.close()
        reports += [await run_plainly(repository, files, tests, 20.0) for files in (broken, {})]
        assert not any(report.tampering for report in reports)
        return [dict(report.outcomes) for report in reports]

    warm, plain, original = asyncio.run(run())
    failed = [TestOutcome.FAILED, TestOutcome.PASSED, TestOutcome.FAILED]
    assert list(warm.values()) == failed
    assert list(plain.values()) == failed
    assert set(original.values()) == {TestOutcome.PASSED}
