"""Writes and reads published problems, and reads the repositories on which they were proven."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import ValidationError

from ostinato.infra.agent.config import HarnessConfig, PromptFacts, RecentFile
from ostinato.infra.agent.regions import RegionError, open_region
from ostinato.infra.platform.errors import ProblemError
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.problems.config import PROBLEMS_FILE
from ostinato.tasks.records import Problem, Split

REPOSITORIES_FOLDER = "repositories"


def write_problems(directory: Path, problems: Iterable[Problem]) -> None:
    """Writes problems.jsonl, one problem per line."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = "".join(problem.model_dump_json() + "\n" for problem in problems)
    (directory / PROBLEMS_FILE).write_text(lines)


def load_problems(directory: Path, split: Split | None = None) -> list[Problem]:
    """Problems of a directory, or of one split. ProblemError names the file and the line."""
    path = directory / PROBLEMS_FILE
    if not path.is_file():
        raise ProblemError(
            f"problems directory {directory} holds no {PROBLEMS_FILE}, wanted a built problem set"
        )
    problems = read_problems(path.read_bytes(), str(path))
    return [problem for problem in problems if split is None or problem.split is split]


def read_problems(content: bytes, name: str) -> list[Problem]:
    """Problems of JSON lines. `name`: name of their file, for errors."""
    problems = []
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            problems.append(Problem.model_validate_json(line))
        except ValidationError as error:
            raise ProblemError(f"{name} line {number} is no problem: {error}") from None
    return problems


def load_repositories(directory: Path) -> dict[str, PreparedRepository]:
    """The repositories of a problem set, by name. ProblemError if one differs from the repository of the proofs."""
    problems = load_problems(directory)
    names = sorted({problem.repository for problem in problems})
    found = {
        name: PreparedRepository.load(directory / REPOSITORIES_FOLDER / name) for name in names
    }
    for problem in problems:
        seen = found[problem.repository].fingerprint
        if seen != problem.repository_fingerprint:
            raise ProblemError(
                f"problem {problem.problem_id}: repository {problem.repository} has fingerprint "
                f"{seen}, wanted {problem.repository_fingerprint}; build the problems again"
            )
    return found


def facts_of(problem: Problem, broken: Mapping[str, bytes], harness: HarnessConfig) -> PromptFacts:
    """The broken function as an open file, if the harness shows one. `broken`: initial files of the agent."""
    if not harness.shown_lines or problem.path not in broken or not problem.symbol:
        return PromptFacts()
    text = broken[problem.path].decode()
    try:
        region = open_region(text, f"{problem.path}::{problem.symbol}")
    except RegionError:  # the whole function was deleted
        return PromptFacts()
    shown = "\n".join(region.lines[: harness.shown_lines])
    recent = RecentFile(path=problem.path, first_line=region.first_line, text=shown)
    return PromptFacts(recent_files=(recent,))
