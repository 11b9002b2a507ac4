"""Controls at equal tokens: what the start would solve, from attempts it made."""

import itertools

import pytest

from ostinato.infra.agent.transcript import TurnRecord
from ostinato.infra.platform.diffs import unified_diff
from ostinato.infra.platform.errors import GradingError
from ostinato.tasks.evaluation.attempts import AttemptRow
from ostinato.tasks.evaluation.controls import best_of, compare_with_controls, restart, spend
from ostinato.tasks.evaluation.statistics import attempt_row
from ostinato.tasks.records import Outcome, Trajectory
from ostinato.tasks.rollout.records import AttemptRequest
from tests.benchmarks import ablations
from tests.fakes.rollouts import make_problem, make_trajectory
from tests.fakes.transcripts import make_call


def rows_of(solved: str, tokens: int = 100, problem: str = "p", **changes) -> list[AttemptRow]:
    """One attempt a character; + solves and takes half the tokens."""
    return [
        AttemptRow(
            problem_id=problem,
            attempt=index,
            solved=mark == "+",
            generated_tokens=tokens // 2 if mark == "+" else tokens,
            turns=1,
            tool_calls=2,
            broken_calls=0,
            **changes,
        )
        for index, mark in enumerate(solved)
    ]


@pytest.mark.parametrize("marks", ["+---", "++--", "----", "++++", "+-"])
@pytest.mark.parametrize("most", [1, 2])
def test_a_restart_loop_is_the_mean_over_all_orders_of_its_attempts(marks: str, most: int) -> None:
    rows = rows_of(marks)
    solved, spent = [], []
    for order in itertools.permutations(rows):
        made = []
        for row in order[:most]:
            made.append(row)
            if row.solved:
                break
        solved.append(made[-1].solved)
        spent.append(sum(row.generated_tokens for row in made))
    expected = sum(solved) / len(solved), sum(spent) / len(spent)
    assert restart(rows, most) == pytest.approx(expected)


def test_tokens_between_whole_attempts_are_spent_in_proportion() -> None:
    by_problem = {"a": rows_of("+--"), "b": rows_of("---")}
    one = sum(best_of(rows, 1)[1] for rows in by_problem.values()) / 2
    values, spent, is_equal = spend(by_problem, best_of, 1.5 * one)
    assert is_equal
    assert spent == pytest.approx(1.5 * one)
    assert values == pytest.approx({"a": (1 / 3 + 2 / 3) / 2, "b": 0.0})
    _, spent, is_equal = spend(by_problem, best_of, 100 * one)
    assert not is_equal
    assert spent == pytest.approx(3 * one)


def many(solved: str, tokens: int) -> list[AttemptRow]:
    return [
        row
        for index in range(60)
        for row in rows_of(solved, tokens, f"p{index}", function=f"f{index % 20}")
    ]


def test_a_policy_that_only_tries_more_often_gains_nothing_over_restarts() -> None:
    start = many("+---", 100)
    twice = many("++--", 300)  # as two restarts would, for more tokens than they take
    report = compare_with_controls(start, twice)
    plain, restarts, _ = report.controls
    assert plain.difference is not None
    assert restarts.difference is not None
    assert plain.difference.low > 0
    assert restarts.difference.high <= 0
    assert not report.gain_counts
    assert compare_with_controls(start, many("+++-", 100)).gain_counts


def test_no_gain_over_controls_whose_attempts_are_used_up() -> None:
    start = many("--", 95)  # 190 tokens at most
    report = compare_with_controls(start, many("++--", 1000))
    for control in report.controls:
        assert control.difference is not None
        assert control.difference.low > 0
    assert [control.has_equal_tokens for control in report.controls[1:]] == [False, False]
    assert not report.gain_counts
    assert compare_with_controls(start, many("++--", 200)).gain_counts  # 150 a problem


def test_the_start_alone_is_the_control_of_fewer_tokens() -> None:
    fewer = compare_with_controls(many("+---", 100), many("++--", 50))
    plain, restarts, best = fewer.controls
    assert plain.solved == restarts.solved == best.solved == pytest.approx(0.25)
    assert min(control.generated_tokens for control in fewer.controls) > 50
    assert all(control.has_equal_tokens for control in fewer.controls)
    assert fewer.gain_counts


def test_committed_rows_are_readable_and_count_no_gain_of_more_tokens_than_two_attempts() -> None:
    for row in ablations.read_rows().values():
        before, after = row.tokens
        assert not row.gain_counts or after <= 2 * before


def test_another_checkpoint_is_a_control_that_a_gain_has_to_beat() -> None:
    start, trained = many("+---", 100), many("+++-", 100)
    assert compare_with_controls(start, trained, {"tuned": many("++--", 100)}).gain_counts
    report = compare_with_controls(start, trained, {"tuned": many("+++-", 200)})
    tuned = next(control for control in report.controls if control.name == "tuned")
    assert tuned.solved == pytest.approx(0.75)
    assert tuned.difference is not None
    assert tuned.difference.mean == pytest.approx(0)
    assert not report.gain_counts


def test_other_problems_are_refused() -> None:
    with pytest.raises(GradingError, match="start was tried on 1 problems, trained on 1, 0 of"):
        compare_with_controls(rows_of("+-", problem="a"), rows_of("+-", problem="b"))
    with pytest.raises(GradingError, match="tuned was tried on 1 problems, trained on 1, 0 of"):
        compare_with_controls(rows_of("+-"), rows_of("+-"), {"tuned": rows_of("+-", problem="b")})


def played(*results: str, solved: bool) -> Trajectory:
    """Turns of one edit and one test run each."""
    turns = tuple(
        TurnRecord(
            generated_tokens=5,
            text="",
            calls=(
                make_call("edit_file", content=f"line {index // 2}"),
                make_call("run_terminal", command="pytest"),
            ),
            results=("edited", result),
        )
        for index, result in enumerate(results)
    )
    request = AttemptRequest("t", "g", make_problem("p"), 0, 0, 1)
    made = make_trajectory(request, solved=solved)
    transcript = made.transcript.model_copy(update={"turns": turns})
    return made.model_copy(update={"transcript": transcript})


def test_a_row_says_whether_the_first_edit_solved_and_whether_one_came_twice() -> None:
    problem = make_problem("p")
    first = attempt_row(played("passed", solved=True), problem)
    assert (first.first_edit_solved, first.repeats_edit, first.edits) == (True, False, 1)
    later = attempt_row(played("failed", "failed", "passed", solved=True), problem)
    assert (later.first_edit_solved, later.repeats_edit, later.edits) == (False, True, 3)
    undone = attempt_row(played("passed", "passed", solved=True), problem)
    assert undone.first_edit_solved
    assert later.function == "pkg/pkg/code.py::one"


def test_a_row_says_what_the_attempt_took_and_counts_product_lines_beside_the_reference() -> None:
    problem = make_problem("p")
    request = AttemptRequest("t", "g", problem, 0, 0, 1)
    made = make_trajectory(request, started_at=3.0, finished_at=5.5)
    assert made.verdict is not None
    before = [f"line {number}\n" for number in range(9)]
    repaired = before.copy()
    repaired[4] = problem.edits[0].gold_text + "\n"
    patch = unified_diff(
        "pkg/code.py", "".join(before).encode(), "".join(repaired).encode(), context_lines=0
    )
    changed = {"pkg/code.py": patch, "tests/test_code.py": patch}
    ignored = made.verdict.model_copy(update={"ignored_paths": ("tests/test_code.py",)})
    row = attempt_row(
        made.model_copy(update={"changed_files": changed, "verdict": ignored}), problem
    )
    assert (row.seconds, row.prompt_tokens, row.generated_tokens) == (2.5, 3, 2)
    assert row.changed_lines == row.reference_lines == 1

    failed = make_trajectory(request, versions=(), outcome=Outcome.ENGINE_FAILED)
    environment = problem.model_copy(update={"edits": (), "environment": "sums"})
    unknown = attempt_row(failed, environment)
    assert (unknown.prompt_tokens, unknown.changed_lines, unknown.reference_lines) == (None,) * 3
