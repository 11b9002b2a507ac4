"""Reading a problem set."""

from pathlib import Path

import pytest

from ostinato.infra.platform.errors import ProblemError
from ostinato.tasks.problems.published import load_problems, load_repositories
from ostinato.tasks.records import Split
from tests.fakes.miniature import make_problem_set


def test_problems_of_a_split_come_with_their_repository(tmp_path: Path) -> None:
    directory = make_problem_set(tmp_path, Split.HELD_OUT)
    problems = load_problems(directory, Split.HELD_OUT)
    (repository,) = load_repositories(directory).values()
    assert {problem.repository_fingerprint for problem in problems} == {repository.fingerprint}
    assert load_problems(directory, Split.TRAIN) == []


def test_directory_without_problems_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match=r"holds no problems.jsonl"):
        load_problems(tmp_path)


def test_damaged_line_is_named(tmp_path: Path) -> None:
    path = make_problem_set(tmp_path) / "problems.jsonl"
    path.write_text(path.read_text() + '{"problem_id": "x"}\n')
    with pytest.raises(ProblemError, match="line 5 is no problem"):
        load_problems(tmp_path)
