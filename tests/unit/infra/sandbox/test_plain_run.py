"""The second runner agrees with the warm test server about tests that go on after a failed part."""

import asyncio
from pathlib import Path

import pytest

from ostinato.infra.sandbox.plain_run import run_plainly
from ostinato.infra.sandbox.protocol import TestOutcome, TestReport
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.infra.sandbox.test_server import TestServer
from ostinato.tasks.grading.config import Pattern
from ostinato.tasks.grading.judging.verdicts import _agree
from tests.fakes.one_line_problem import PATH, TESTS, make_one_line_problem, write_package

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


def test_a_canary_that_errs_confirms_nothing_and_accuses_nobody(tmp_path: Path) -> None:
    source = "def double(number):\n    return 2 * number\n"
    tests = (
        "import pytest\nfrom pkg.code import double\n\n"
        "def test_one():\n    assert double(1) == 2\n\ndef test_two():\n    assert double(2) == 5\n"
    )
    repository = write_package(tmp_path, source, tests)
    # the same process runs the canaries, whose set-up now fails
    broken = {
        PATH: source.encode()
        + b"import _pytest.runner as runner\nwhole = runner.pytest_runtest_setup\n"
        b"def setup(item):\n    if 'second' in str(item.path):\n        raise OSError('no space')\n    whole(item)\n"
        b"import gc\n"
        b"for one in gc.get_objects():\n"
        b"    if type(one).__name__ == 'HookImpl' and one.function is whole:\n        one.function = setup\n"
    }
    wanted = [f"{TESTS}::test_one", f"{TESTS}::test_two"]
    report = asyncio.run(run_plainly(repository, broken, wanted, 20.0))
    assert not report.tampering
    assert list(report.outcomes.values()) == [TestOutcome.TIMEOUT, TestOutcome.FAILED]
    honest = report.model_copy(update={"outcomes": dict.fromkeys(wanted[:1], TestOutcome.PASSED)})
    agreed = _agree(honest, report)
    assert not agreed.passed
    assert not agreed.tampering
    different = report.model_copy(
        update={"outcomes": dict.fromkeys(wanted[:1], TestOutcome.FAILED)}
    )
    assert _agree(honest, different).tampering.startswith(Pattern.RUNNERS_DISAGREE)


@pytest.mark.parametrize("rule", ["python_functions = it_*", "usefixtures = ready"])
def test_canaries_run_under_a_projects_own_rules(rule: str, tmp_path: Path) -> None:
    """Its tests have other names, or need a fixture that a canary's file has not."""
    source = "def double(number):\n    return 2 * number\n"
    tests = "from pkg.code import double\n\ndef it_one():\n    assert double(1) == 2\n\ntest_two = it_one\n"
    repository = write_package(tmp_path, source, tests)
    (repository.directory / "pytest.ini").write_text(f"[pytest]\n{rule}\n")
    fixture = "import pytest\n\n@pytest.fixture\ndef ready():\n    pass\n"
    (repository.directory / "tests/conftest.py").write_text(fixture)
    repository = PreparedRepository.from_directory(
        "kit", repository.directory, repository.package_paths, repository.test_paths
    )
    wanted = f"{TESTS}::it_one" if "it_" in rule else f"{TESTS}::test_two"
    fooling = source.encode() + (
        b"import _pytest.python as python\npython.Function.runtest = lambda self: None\n"
    )

    async def run() -> list[TestReport]:
        server = TestServer(repository)
        try:
            reports = [await server.run(files, [wanted]) for files in ({}, {PATH: fooling})]
        finally:
            await server.close()
        return [*reports, await run_plainly(repository, {}, [wanted], 20.0)]

    honest, fooled, plain = asyncio.run(run())
    for report in (honest, plain):
        assert (report.tampering, dict(report.outcomes)) == ("", {wanted: TestOutcome.PASSED})
    assert "canary test_must_fail_on_assert passed" in fooled.tampering
