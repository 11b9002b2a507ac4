"""`ostinato problems export`: a problem set as tasks of Harbor."""

import importlib.metadata
from pathlib import Path

from ostinato.flows.stages.checkpoints import PROBLEM_KINDS
from ostinato.flows.stages.console import say
from ostinato.infra.platform.artifacts import open_artifacts
from ostinato.infra.platform.errors import ConfigError, ProblemError
from ostinato.infra.platform.settings import Settings
from ostinato.tasks.problems.given.harbor_writing import write_task
from ostinato.tasks.problems.published import PROBLEMS_FILE, load_problems, load_repositories


def export_tasks(settings: Settings, place: str, directory: Path, limit: int | None) -> int:
    """The number of tasks written to `directory`, a folder each. Others are named with the reason."""
    folder = _find_set(settings, place)
    repositories = load_repositories(folder)
    version = importlib.metadata.version("pytest")
    written = 0
    for problem in load_problems(folder):
        if written == limit:
            break
        try:
            write_task(problem, repositories[problem.repository], directory, version)
            written += 1
        except ProblemError as error:
            say(f"  left out: {error}")
    return written


def _find_set(settings: Settings, place: str) -> Path:
    if (Path(place) / PROBLEMS_FILE).is_file():
        return Path(place)
    if "/" not in place or "@" not in place:
        raise ConfigError(
            f"PROBLEMS is {place!r}, wanted a folder with {PROBLEMS_FILE} or an artifact "
            "problems/NAME@VERSION"
        )
    artifacts = open_artifacts(settings)
    ref = artifacts.get(place)
    if ref.kind not in PROBLEM_KINDS:
        raise ConfigError(f"{place} is no problem set, wanted one of {', '.join(PROBLEM_KINDS)}")
    return artifacts.local_copy(ref, settings.home)
