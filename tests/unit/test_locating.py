"""Locating rows count what lies before the function was read; comparisons pair the same problems."""

import pytest

from ostinato.infra.agent.transcript import CallStatus, TurnRecord
from ostinato.tasks.records import Trajectory
from ostinato.tasks.rollout.records import AttemptRequest
from tests.benchmarks.locating import SEARCH_TOOLS, LocatingRow, compare_arms, locating_row
from tests.fakes.rollouts import make_problem, make_trajectory
from tests.fakes.transcripts import make_call, masked_segment, transcript_of

PROMPT_TOKENS = 5
RESULTS = {  # of a search, by its query
    "there": "<L1>pkg/other.py:3-9 def two():\n<L2>pkg/code.py:1-2 def one():",
    "name": "pkg/code.py:1:def one():",
    "elsewhere": "pkg/other.py:1:def one():\npkg/code.py:7:    one()",
}


def turn(tokens: int, **arguments: str) -> TurnRecord:
    """One call; `grep="x"` calls grep with its first argument x."""
    calls = tuple(
        make_call(tool, CallStatus.OK, **{"path" if tool == "read_file" else "query": value})
        for tool, value in arguments.items()
    )
    results = tuple(
        RESULTS.get(call.arguments["query"], "") if call.tool in SEARCH_TOOLS else ""
        for call in calls
    )
    return TurnRecord(generated_tokens=tokens, text="", calls=calls, results=results)


def attempt_of(turns: tuple[TurnRecord, ...], result_tokens: int) -> Trajectory:
    """A trajectory whose every answer is followed by a result of so many tokens. A summary ends its
    segment.
    """
    masks = [[False] * PROMPT_TOKENS]
    for item in turns:
        masks[-1] += [True] * item.generated_tokens
        if item.is_summary:
            masks.append([False] * PROMPT_TOKENS)
        else:
            masks[-1] += [False] * result_tokens
    problem = make_problem("p")
    request = AttemptRequest(
        trajectory_id="t", group_id="g", problem=problem, attempt=1, retry=0, seed=0
    )
    transcript = transcript_of(turns, tuple(masked_segment(mask) for mask in masks))
    return make_trajectory(request).model_copy(update={"transcript": transcript})


@pytest.mark.parametrize("place", ["pkg/code.py::one", "./pkg/code.py:1-2", "pkg/code.py:2"])
def test_what_lies_before_the_read_is_counted(place: str) -> None:
    turns = (turn(4, grep="x"), turn(6, codebase_search="y"), turn(3, read_file=place), turn(9))
    row = locating_row(make_problem("p"), attempt_of(turns, result_tokens=20))
    assert (row.located, row.turns, row.searches) == (True, 2, 2)
    assert row.generated_tokens == 10


@pytest.mark.parametrize("place", ["pkg/code.py::two", "pkg/other.py::one", "pkg/code.py:3-9"])
def test_another_place_is_not_the_function_and_all_of_the_attempt_counts(place: str) -> None:
    turns = (turn(4, grep="x"), turn(3, read_file=place))
    row = locating_row(make_problem("p"), attempt_of(turns, result_tokens=20))
    assert (row.located, row.turns, row.searches) == (False, 2, 1)
    assert row.generated_tokens == 7


@pytest.mark.parametrize(
    ("query", "shown"), [("there", True), ("name", True), ("elsewhere", False)]
)
def test_a_function_is_shown_where_a_search_names_its_definition(query: str, shown: bool) -> None:
    for tool in ("grep", "codebase_search"):
        row = locating_row(make_problem("p"), attempt_of((turn(4, **{tool: query}),), 20))
        assert (row.shown, row.located) == (shown, False)


def rows_of(solved: dict[str, tuple[bool, bool]]) -> list[LocatingRow]:
    """Two attempts a problem; what is solved was located."""
    return [
        LocatingRow(
            problem_id=name,
            attempt=attempt,
            function=name[0],
            solved=value,
            shown=value,
            located=value,
            turns=2,
            searches=1,
            generated_tokens=30,
        )
        for name, values in solved.items()
        for attempt, value in enumerate(values)
    ]


def test_the_difference_is_with_minus_without_over_shared_problems() -> None:
    better = rows_of({"a1": (True, True), "a2": (True, False), "b1": (False, False)})
    worse = rows_of({"a1": (True, False), "a2": (False, False), "c1": (True, True)})
    found = compare_arms(better, worse, confidence=0.9)
    assert found.solved_difference.count == 2
    assert found.solved_difference.mean == pytest.approx(0.5)
    assert found.solved_difference_by_function.mean == pytest.approx(0.5)
    assert found.arms["with"].solved.mean == pytest.approx(0.5)
    assert found.arms["with"].solved_when_located == 1.0
    swapped = compare_arms(worse, better, confidence=0.9)
    assert swapped.solved_difference.mean == -found.solved_difference.mean
    assert swapped.located_difference.mean == -found.located_difference.mean
