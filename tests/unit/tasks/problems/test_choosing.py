"""A recipe uses a part of a set: what is kept is on disk, counted, and never nothing."""

from pathlib import Path

import pytest

from ostinato.infra.platform.errors import ProblemError
from ostinato.tasks.problems.config import Kind, ProblemSelection, ProblemsResult
from ostinato.tasks.problems.published import load_problems, write_problems
from ostinato.tasks.problems.run import choose_problems
from ostinato.tasks.records import Split
from tests.fakes.rollouts import make_problem

RESULT = ProblemsResult(
    directory="",
    num_problems=3,
    num_candidates=9,
    yield_ratio=0.3,
    split_sizes={},
    kinds={},
    operators={},
    repositories={},
    left_out={},
    yield_table=(),
    seconds=1.0,
)


def written(directory: Path) -> ProblemsResult:
    """Two mutations of 4 and 9 lines and a deleted function, in three splits."""
    changes = (
        {"kind": "mutation", "last_line": 4, "split": Split.TRAIN},
        {"kind": "mutation", "last_line": 9, "split": Split.HELD_OUT},
        {"kind": "deleted_function", "last_line": 2, "split": Split.USER},
    )
    problems = [
        make_problem(f"p{index}").model_copy(update={"first_line": 1, **change})
        for index, change in enumerate(changes)
    ]
    write_problems(directory, problems)
    return RESULT.model_copy(update={"directory": str(directory)})


@pytest.mark.parametrize(
    ("selection", "kept"),
    [
        (ProblemSelection(), ["p0", "p1", "p2"]),
        (ProblemSelection(kinds=(Kind.MUTATION,)), ["p0", "p1"]),
        (ProblemSelection(max_lines=4), ["p0", "p2"]),
        (ProblemSelection(kinds=(Kind.MUTATION,), max_lines=4), ["p0"]),
    ],
)
def test_problems_of_a_selection_stay_and_are_counted(
    tmp_path: Path, selection: ProblemSelection, kept: list[str]
) -> None:
    result = choose_problems(written(tmp_path), selection)
    problems = load_problems(tmp_path)
    assert [problem.problem_id for problem in problems] == kept
    assert result.num_problems == len(kept)
    if selection != ProblemSelection():
        assert sum(result.split_sizes.values()) == sum(result.kinds.values()) == len(kept)


def test_a_selection_that_keeps_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match=r"keeps none of 3 problems.*max_lines=1"):
        choose_problems(written(tmp_path), ProblemSelection(max_lines=1))
