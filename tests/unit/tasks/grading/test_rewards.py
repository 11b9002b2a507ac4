"""Laws of the reward: terms add up, only passing pays, order and idle settings change nothing."""

import importlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.flows.reporting.attempts import reward_lines
from ostinato.infra.agent.loop.segments import SegmentBuilder
from ostinato.infra.agent.transcript import (
    CallStatus,
    EndReason,
    SamplingDistribution,
    ToolCallRecord,
    Transcript,
    TurnRecord,
)
from ostinato.infra.platform.errors import GradingError
from ostinato.infra.platform.plugins import installed_entries
from ostinato.tasks.grading.change import AttemptChange, JudgedAttempt
from ostinato.tasks.grading.config import GradingConfig, Pattern
from ostinato.tasks.grading.grade import grade, make_grader, void
from ostinato.tasks.grading.rewards import (
    compute_reward,
    length_penalty,
    measure_effort,
    term_weights,
    total_effort,
)
from ostinato.tasks.records import RewardReport, Verdict
from tests.unit.tasks.grading.conftest import PATH

OK, BAD = CallStatus.OK, CallStatus.MALFORMED
CONFIG = GradingConfig(unverified=0.1)
EVERYTHING = GradingConfig(
    unverified=0.1,
    style=0.02,
    comments=0.1,
    communication=0.05,
    open_todo=0.02,
    needless_question=0.05,
    missing_question=0.1,
    flagged=0.2,
)
WEIGHT = st.floats(0, 10)


def verdict(passed: bool) -> Verdict:
    return Verdict(
        problem_id="p",
        passed=passed,
        tests_required=1,
        tests_passed=int(passed),
        outcomes={"t": "passed" if passed else "failed"},
    )


def reward(problem, repository, transcript, passed=True, files=None, config=CONFIG, **more):
    change = AttemptChange.of(problem, files or {}, repository)
    return compute_reward(JudgedAttempt(change, verdict(passed), transcript), config, **more)


def call(tool, status=OK, **arguments) -> ToolCallRecord:
    return ToolCallRecord(tool=tool, arguments=arguments, status=status, wall_seconds=0.0)


def transcript_of(*calls, message="", end=EndReason.FINISHED) -> Transcript:
    turns = tuple(
        TurnRecord(generated_tokens=10, text=f"<{one.tool}>", calls=(one,), results=("ok",))
        for one in calls
    )
    return Transcript(
        segments=(), turns=turns, end_reason=end, final_message=message, wall_seconds=1.0
    )


def in_two_segments(transcript: Transcript) -> Transcript:
    builder = SegmentBuilder([1, 2], SamplingDistribution())
    return transcript.model_copy(update={"segments": (builder.build(), builder.build())})


def test_total_is_the_sum_of_the_terms_and_each_is_value_times_weight(
    problem, repository, make_transcript
):
    report = reward(
        problem, repository, make_transcript(("read_file", OK), ("grep", BAD)), config=EVERYTHING
    )
    assert report.total == sum(report.terms.values())
    assert report.terms == {
        name: report.weights[name] * value for name, value in report.values.items()
    }
    assert list(report.terms) == list(term_weights(EVERYTHING))


def test_report_that_does_not_add_up_is_refused():
    with pytest.raises(ValueError, match="wanted 1"):
        RewardReport(total=2.0, terms={"correctness": 1.0})
    with pytest.raises(ValueError, match="the same names"):
        RewardReport(total=1.0, terms={"a": 1.0}, values={"b": 1.0}, weights={"b": 1.0})


def test_default_settings_give_the_five_terms_of_a_plain_run(problem, repository, make_transcript):
    broken = problem.break_files(repository.files)
    for passed, files in ((True, {}), (False, broken)):
        transcript = make_transcript(("read_file", OK), ("grep", BAD), ("edit_file", OK))
        config = GradingConfig()
        report = reward(problem, repository, transcript, passed, files, config)
        effort = total_effort(measure_effort(transcript), config.effort)
        penalty = -config.length * length_penalty(effort, config.length_k, config.length_q)
        assert report.total == float(passed) + penalty - 0.02 - 0.05 * float(not passed)


@settings(max_examples=50)
@given(weights=st.lists(WEIGHT, min_size=11, max_size=11), passed=st.booleans())
def test_only_passing_pays_whatever_the_weights(problem, repository, weights, passed):
    names = (
        "length", "broken_call", "no_edit", "unverified", "style", "comments", "communication",
        "open_todo", "needless_question", "missing_question", "flagged",
    )  # fmt: skip
    config = GradingConfig(**dict(zip(names, weights, strict=True)))
    transcript = transcript_of(
        call("ask_user", text="which?"), call("todo_write", text="a\nb"), call("grep", BAD)
    )
    report = reward(
        problem, repository, transcript, passed, config=config, new_lints=3, flags={"x": "y"}
    )
    assert all(value <= 0 for name, value in report.terms.items() if name != "correctness")
    assert report.terms["correctness"] == float(passed)
    assert report.total <= float(passed)


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32))
def test_order_of_files_flags_and_lists_changes_nothing(problem, repository, seed):
    chance = random.Random(seed)
    files = {
        PATH: repository.files[PATH] + b"# one\n",
        "wordkit/new.py": b"import os\n",
        "notes.txt": b"x",
        "tests/test_counting.py": b"",
    }
    flags = {pattern.value: "seen" for pattern in list(Pattern)[:5]}
    shuffled_files = dict(chance.sample(list(files.items()), len(files)))
    shuffled_flags = dict(chance.sample(list(flags.items()), len(flags)))
    transcript = transcript_of(call("edit_file"))
    first = reward(problem, repository, transcript, files=files, flags=flags, config=EVERYTHING)
    second = reward(
        problem,
        repository,
        transcript,
        files=shuffled_files,
        flags=shuffled_flags,
        config=EVERYTHING,
    )
    assert first.model_dump_json() == second.model_dump_json()


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

    def has_edit(files):
        return AttemptChange.of(problem, files, repository).has_edit

    assert not has_edit(broken)
    assert not has_edit({**broken, "notes.txt": b"", "tests/test_counting.py": b""})
    assert has_edit({})
    assert has_edit({**broken, "wordkit/new.py": b"x = 1\n"})
    assert has_edit({PATH: None})


def test_asking_costs_where_it_was_not_needed_and_not_where_it_was(problem, repository):
    asks = transcript_of(call("ask_user", text="which?"))
    again = transcript_of(call("ask_user", text="which?"), call("ask_user", text="sure?"))
    silent = transcript_of()
    open_problem = problem.model_copy(update={"question_warranted": True})

    def cost(which, transcript, passed):
        terms = reward(which, repository, transcript, passed, config=EVERYTHING).terms
        return round(terms["needless_questions"] + terms["missing_question"], 6)

    assert cost(problem, asks, True) == -0.05
    assert cost(problem, silent, False) == 0.0
    assert cost(open_problem, asks, False) == 0.0
    assert cost(open_problem, again, True) == -0.05
    assert cost(open_problem, silent, False) == -0.1
    assert cost(open_problem, silent, True) == 0.0


def test_voided_pass_is_a_failure_with_its_reason():
    voided = void(verdict(True), ["hard_coded_tests"])
    assert not voided.passed
    assert voided.tampering == ("hard_coded_tests",)
    assert void(verdict(True), []).passed


def test_grade_and_grader_agree(runner, problem, server, make_transcript):
    transcript = make_transcript(("edit_file", OK), ("run_terminal", OK))
    config = GradingConfig()
    direct = runner.run(grade(problem, {}, transcript, server, config))
    bound = runner.run(make_grader(config)(problem, {}, transcript, server))
    assert direct[1] == bound[1]
    assert direct[0].passed
    assert direct[1].total > 0.9


def test_new_lints_cost_and_old_ones_do_not(runner, problem, server, repository, make_transcript):
    transcript = make_transcript(("edit_file", OK))
    config = GradingConfig(style=0.02)
    clean = runner.run(grade(problem, {}, transcript, server, config))[1]
    files = {PATH: b"import os\nimport sys\n" + repository.files[PATH]}
    dirty = runner.run(grade(problem, files, transcript, server, config))[1]
    assert clean.values["style"] == 0
    assert dirty.values["style"] == 2
    assert dirty.terms["style"] == -0.04


ODD_REWARDS = """
import decimal as d, math
import numpy as np
VALUES = {
    "nan": math.nan, "infinite": -math.inf, "nan_text": "nan", "text": "0.5", "none": None, "bytes": b"1",
    "decimal_nan": d.Decimal("nan"), "numpy_nan": np.float32("nan"), "huge": 10**400,
    "huge_float": 1e300, "complex": 1j, "numpy_array": np.ones(3),
    "three": [1.0, 1.0, 1.0], "texts": ["1.0", "1.0"], "one_nan": [1.0, math.nan],
    "true": True, "whole": 3, "numpy": np.float32(0.5), "decimal": d.Decimal("0.5"),
    "segments": [2.0, 1], "same_segments": (0.25, 0.25),
}
def exit(attempt):
    raise SystemExit(3)
def meddle(attempt):
    attempt.transcript.segments[0].logprobs_T[:] = math.nan
    attempt.verdict.outcomes["another"] = "passed"
    attempt.change.problem.facts["another"] = "fact"
    return 1.0
def __getattr__(name):
    if name not in VALUES:
        raise AttributeError(name)
    return lambda attempt: VALUES[name]
"""
RIGHT = {
    "true": 1.0, "whole": 3.0, "numpy": 0.5, "decimal": 0.5, "segments": 1.5, "same_segments": 0.25,
}  # fmt: skip
SEGMENTS = {"segments": (0.5, -0.5)}


@pytest.fixture
def odd_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """An installed package whose rewards measure all sorts of things."""
    (tmp_path / "odd_rewards.py").write_text(ODD_REWARDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    names = list(importlib.import_module("odd_rewards").VALUES)
    functions = ["exit", "meddle"]
    information = tmp_path / "odd_rewards-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: odd-rewards\nVersion: 1\n")
    lines = "".join(f"{name} = odd_rewards:{name}\n" for name in [*names, *functions])
    (information / "entry_points.txt").write_text(f"[ostinato.rewards]\n{lines}")
    installed_entries.cache_clear()
    yield names
    installed_entries.cache_clear()


def test_what_a_package_measures_is_a_finite_number_or_refused_by_name_and_value(
    problem, repository, make_transcript, odd_rewards
):
    transcript = in_two_segments(make_transcript(("read_file", OK)))
    for name in odd_rewards:
        config = GradingConfig(rewards={name: 1.0})
        if name in RIGHT:
            report = reward(problem, repository, transcript, config=config)
            assert report.values[name] == RIGHT[name]
            assert report.segments == SEGMENTS.get(name, ())
            shown = "\n".join(reward_lines(report.model_dump()))
            assert ("segment 1 -0.500" in shown) == (name in SEGMENTS)
            assert type(report.values[name]) is float
            assert RewardReport.model_validate_json(report.model_dump_json()) == report
            continue
        with pytest.raises(GradingError, match=f"reward {name}") as caught:
            reward(problem, repository, transcript, config=config)
        assert len(str(caught.value)) < 400


def test_a_package_that_exits_is_refused_by_name(problem, repository, make_transcript, odd_rewards):
    config = GradingConfig(rewards={"exit": 1.0})
    with pytest.raises(GradingError, match="reward exit exits with 3, wanted a number"):
        reward(problem, repository, make_transcript(("read_file", OK)), config=config)


def test_a_package_cannot_change_the_records_of_an_attempt(
    problem, repository, make_transcript, odd_rewards
):
    transcript = in_two_segments(make_transcript(("read_file", OK)))
    facts, logprobs_T = dict(problem.facts), transcript.segments[0].logprobs_T.copy()
    config = GradingConfig(rewards={"meddle": 1.0})
    assert reward(problem, repository, transcript, config=config).values["meddle"] == 1.0
    assert transcript.segments[0].logprobs_T.tolist() == logprobs_T.tolist()
    assert problem.facts == facts
