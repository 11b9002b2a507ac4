"""The report line: what failed, short, and at which line of the region read."""

import pytest

from ostinato.infra.agent.regions import Region
from ostinato.infra.agent.tools.testing import describe_report, did_tests_pass, report_tests
from ostinato.infra.sandbox.protocol import Frame, TestFailure, TestOutcome, TestReport


def region_of(path: str, first_line: int, num_lines: int) -> Region:
    return Region(path, ("",) * (first_line - 1), ("",) * num_lines, ())


FRAMES = (
    Frame(path="t.py", line_number=9),
    Frame(path="m.py", line_number=12),
    Frame(path="o.py", line_number=1),
)


def failing(
    error_type: str = "NameError", message: str = "name 'x' is\n not defined", **fields
) -> TestReport:
    failure = TestFailure(test_id="t.py::a", error_type=error_type, message=message, frames=FRAMES)
    return TestReport(
        outcomes={"t.py::a": TestOutcome.FAILED},
        first_failure=failure,
        route="hot",
        seconds=0.0,
        **fields,
    )


@pytest.mark.parametrize(
    ("region", "place"),
    [
        (region_of("m.py", 10, 5), " at <L3>"),
        (region_of("m.py", 13, 5), ""),
        (region_of("m.py", 1, 11), ""),
        (region_of("z.py", 10, 5), ""),
        (None, ""),
    ],
)
def test_failure_text_names_the_line_of_the_region(region, place):
    assert (
        describe_report(failing(), region) == f"failed: NameError: name 'x' is not defined{place}"
    )


def test_failure_text_is_short():
    assert describe_report(failing(message="y" * 500)) == "failed: NameError: " + "y" * 80 + ".."
    assert describe_report(failing(message="")) == "failed: NameError"


def test_passed_missing_and_tampered_texts():
    passed = TestReport(outcomes={"t.py::a": TestOutcome.PASSED}, route="hot", seconds=0.0)
    missing = TestReport(outcomes={"t.py::a": TestOutcome.MISSING}, route="hot", seconds=0.0)
    assert describe_report(passed) == "passed"
    assert describe_report(missing) == "failed: missing"
    tampered = passed.model_copy(update={"tampering": "canary"})
    assert describe_report(tampered) == "failed: no tests ran"


@pytest.mark.parametrize("describe", [describe_report, report_tests])
def test_what_an_agent_is_told_of_a_test_run_says_whether_it_passed(describe):
    passed = TestReport(outcomes={"t.py::a": TestOutcome.PASSED}, route="hot", seconds=0.0)
    missing = TestReport(outcomes={"t.py::a": TestOutcome.MISSING}, route="hot", seconds=0.0)
    none = TestReport(outcomes={}, route="hot", seconds=0.0)
    tampered = passed.model_copy(update={"tampering": "canary"})
    for report in (passed, missing, none, tampered, failing()):
        assert did_tests_pass("pytest -q t.py", describe(report)) is report.passed
        assert did_tests_pass("cat report.txt", describe(report)) is None


def test_an_output_of_pytest_itself_says_nothing_certain():
    assert did_tests_pass("python -m pytest", "exit code 1\nE assert 1 == 2") is None
