import pytest

from infra.harness.transcript import CallStatus
from tasks.grading.config import GradingConfig
from tasks.grading.grade import grade, make_grader
from tasks.grading.rewards import compute_reward, has_edit, is_verified
from tasks.records import Verdict
from tests.unit.tasks.grading.conftest import PATH

OK, BAD = CallStatus.OK, CallStatus.MALFORMED
CONFIG = GradingConfig(unverified=0.1)


def verdict(passed: bool) -> Verdict:
    return Verdict(
        problem_id="p",
        passed=passed,
        tests_required=1,
        tests_passed=int(passed),
        outcomes={"t": "passed"},
    )


def reward(problem, repository, transcript, passed=True, files=None, config=CONFIG):
    return compute_reward(problem, verdict(passed), transcript, files or {}, repository, config)


def test_total_is_the_sum_of_the_terms(problem, repository, make_transcript):
    report = reward(problem, repository, make_transcript(("read_file", OK), ("grep", BAD)))
    assert report.total == pytest.approx(sum(report.terms.values()))
    assert set(report.terms) == {"correctness", "length", "broken_calls", "no_edit", "unverified"}


def test_passing_is_worth_more_than_any_economy(problem, repository, make_transcript):
    long_pass = reward(
        problem, repository, make_transcript(*[("grep", OK)] * 8, generated_tokens=60)
    )
    broken = problem.break_files(repository.files)
    short_fail = reward(problem, repository, make_transcript(), passed=False, files=broken)
    assert long_pass.total > short_fail.total


def test_shorter_attempt_gets_more(problem, repository, make_transcript):
    short = reward(problem, repository, make_transcript(("edit_file", OK), ("run_terminal", OK)))
    long = reward(
        problem,
        repository,
        make_transcript(*[("grep", OK)] * 3, ("edit_file", OK), ("run_terminal", OK)),
    )
    assert short.total > long.total
    assert short.terms["correctness"] == long.terms["correctness"]


def test_broken_calls_cost_up_to_their_limit(problem, repository, make_transcript):
    costs = [
        reward(problem, repository, make_transcript(*[("grep", BAD)] * count)).terms["broken_calls"]
        for count in (0, 1, 5, 9)
    ]
    assert costs == pytest.approx([0.0, -0.02, -0.1, -0.1])


def test_environment_errors_and_timeouts_are_not_broken_calls(problem, repository, make_transcript):
    transcript = make_transcript(
        ("grep", CallStatus.ENVIRONMENT), ("run_terminal", CallStatus.TIMEOUT)
    )
    assert reward(problem, repository, transcript).terms["broken_calls"] == 0


def test_edit_is_measured_against_the_broken_state(problem, repository):
    broken = problem.break_files(repository.files)
    assert not has_edit(problem, broken, repository)
    assert not has_edit(
        problem, {**broken, "notes.txt": b"", "tests/test_counting.py": b""}, repository
    )
    assert has_edit(problem, {}, repository)
    assert has_edit(problem, {**broken, "wordkit/new.py": b"x = 1\n"}, repository)
    assert has_edit(problem, {PATH: None}, repository)


@pytest.mark.parametrize(
    ("calls", "verified"),
    [
        ([], True),
        ([("edit_file", OK)], False),
        ([("edit_file", OK), ("run_terminal", OK)], True),
        ([("run_terminal", OK), ("edit_file", OK)], False),
        ([("edit_file", BAD)], True),
    ],
)
def test_verification_means_a_command_after_the_last_edit(make_transcript, calls, verified):
    assert is_verified(make_transcript(*calls)) is verified


def test_grade_and_grader_agree(runner, problem, server, make_transcript):
    transcript = make_transcript(("edit_file", OK), ("run_terminal", OK))
    config = GradingConfig()
    direct = runner.run(grade(problem, transcript, {}, server, config))
    bound = runner.run(make_grader(config)(problem, {}, transcript, server))
    assert direct[1] == bound[1]
    assert direct[0].passed
    assert direct[1].total > 0.9
