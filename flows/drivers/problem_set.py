"""Reads what the problems stage left: problems and the prepared repositories they were proven
on.
"""

from pathlib import Path

from pydantic import ValidationError

from ostinato.infra.platform.errors import ProblemError
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.problems.run import PROBLEMS_FILE, REPOSITORIES_FOLDER
from ostinato.tasks.records import Problem, Split


def load_problems(directory: Path, split: Split | None = None) -> list[Problem]:
    """Problems of a directory, of one split if given. ProblemError names file and line."""
    path = directory / PROBLEMS_FILE
    if not path.is_file():
        raise ProblemError(
            f"problems directory {directory} holds no {PROBLEMS_FILE}, wanted a built problem set"
        )
    problems = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            problems.append(Problem.model_validate_json(line))
        except ValidationError as error:
            raise ProblemError(f"{path} line {number} is no problem: {error}") from None
    return [problem for problem in problems if split is None or problem.split is split]


def load_repositories(directory: Path, names: set[str]) -> list[PreparedRepository]:
    """The named repositories of a problem set."""
    return [
        PreparedRepository.load(directory / REPOSITORIES_FOLDER / name) for name in sorted(names)
    ]
