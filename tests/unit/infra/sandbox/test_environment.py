import pytest

from ostinato.infra.sandbox import (
    Frame,
    RepositoryEnvironment,
    TestFailure,
    TestOutcome,
    TestReport,
    TextRegion,
    report_to_text,
)

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
        (TextRegion("m.py", 10, 5), " at <L3>"),
        (TextRegion("m.py", 13, 5), ""),
        (TextRegion("m.py", 1, 11), ""),
        (TextRegion("z.py", 10, 5), ""),
        (None, ""),
    ],
)
def test_failure_text_names_the_line_of_the_region(region, place):
    assert report_to_text(failing(), region) == f"failed: NameError: name 'x' is not defined{place}"


def test_failure_text_is_short():
    assert report_to_text(failing(message="y" * 500)) == "failed: NameError: " + "y" * 80
    assert report_to_text(failing(message="")) == "failed: NameError"


def test_passed_missing_and_tampered_texts():
    passed = TestReport(outcomes={"t.py::a": TestOutcome.PASSED}, route="hot", seconds=0.0)
    missing = TestReport(outcomes={"t.py::a": TestOutcome.MISSING}, route="hot", seconds=0.0)
    assert report_to_text(passed) == "passed"
    assert report_to_text(missing) == "failed: missing a"
    tampered = passed.model_copy(update={"tampering": "canary"})
    assert report_to_text(tampered) == "failed: the test run was tampered with"


def test_visible_tests_run_on_what_the_box_holds(runner, wordkit):
    async def repair():
        environment = RepositoryEnvironment.create(wordkit, boxes=1)
        try:
            text = wordkit.files["wordkit/counting.py"]
            box = await environment.lease(
                {"wordkit/counting.py": text.replace(b"total += 1", b"total += 2")}
            )
            tests = ("tests/test_counting.py::test_count_words",)
            before = await environment.run_visible_tests(box, tests)
            await box.exec("sed -i 's/total += 2/total += 1/' wordkit/counting.py", 5)
            after = await environment.run_visible_tests(box, tests)
            await environment.release(box)
            return report_to_text(before), report_to_text(after)
        finally:
            await environment.close()

    before, after = runner.run(repair())
    assert before.startswith("failed: AssertionError")
    assert after == "passed"
