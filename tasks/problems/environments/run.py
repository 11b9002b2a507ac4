"""Child entry: adds problems of environments to a problem set."""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from ostinato.infra.platform.cluster.workspace import Workspace
from ostinato.infra.platform.errors import ProblemError
from ostinato.infra.platform.folders import write_folder
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.grading.environments import (
    ENVIRONMENTS,
    DialogueEnvironment,
    Environment,
    EnvironmentConfig,
    ProblemDraft,
)
from ostinato.tasks.problems.config import EnvironmentsRequest, EnvironmentsResult
from ostinato.tasks.problems.published import PROBLEMS_FILE, REPOSITORIES_FOLDER
from ostinato.tasks.records import Problem, Split

MAX_REPEATS = 1_000  # after so many known problems in a row, an environment has no more


def main(request: EnvironmentsRequest, workspace: Workspace) -> EnvironmentsResult:
    """Copies the problem set with hard links, and adds a repository and problems for each environment."""
    target = workspace.directory / "problems"
    shutil.rmtree(target, ignore_errors=True)
    source = Path(request.problems_directory)
    ignored = shutil.ignore_patterns(PROBLEMS_FILE)
    shutil.copytree(source, target, copy_function=os.link, ignore=ignored)
    lines = (source / PROBLEMS_FILE).read_text()
    added: dict[str, int] = {}
    for name, config in request.environments.items():
        environment: Environment = ENVIRONMENTS.load(name)
        folder = target / REPOSITORIES_FOLDER / name.replace(":", "-")
        repository = write_repository(folder.name, environment, folder)
        problems = list(draw_problems(name, environment, repository, config, request.seed))
        lines += "".join(problem.model_dump_json() + "\n" for problem in problems)
        added[name] = len(problems)
    (target / PROBLEMS_FILE).write_text(lines)
    return EnvironmentsResult(directory=str(target), added=added)


def write_repository(name: str, environment: Environment, directory: Path) -> PreparedRepository:
    """Writes the environment's files as a repository in which agents work."""
    if directory.exists():
        raise ProblemError(f"environment {name!r}: a repository of the problem set has that name")
    if not environment.files:
        raise ProblemError(f"environment {name!r} has no files, wanted at least one")
    write_folder(directory / "files", environment.files)
    repository = PreparedRepository.from_directory(name, directory / "files", (), ())
    repository.save()
    return repository


def draw_problems(
    name: str,
    environment: Environment,
    repository: PreparedRepository,
    config: EnvironmentConfig,
    seed: int,
) -> Iterator[Problem]:
    """Distinct problems, those of the training split first."""
    rng = random.Random(f"{name}:{seed}")
    drawn: set[str] = set()
    splits = [Split.TRAIN] * config.train + [Split.HELD_OUT] * config.held_out
    for number, split in enumerate(splits):
        draw = environment.draw
        if split is Split.HELD_OUT and isinstance(environment, DialogueEnvironment):
            draw = environment.draw_held_out
        draft = _draw_new(name, draw, rng, drawn)
        yield Problem(
            problem_id=f"{repository.name}-{number}",
            repository=repository.name,
            repository_fingerprint=repository.fingerprint,
            kind=repository.name,
            environment=name,
            prompt=draft.prompt,
            given_files=draft.files,
            facts=draft.facts,
            split=split,
        )


def _draw_new(
    name: str,
    draw: Callable[[random.Random], ProblemDraft],
    rng: random.Random,
    drawn: set[str],
) -> ProblemDraft:
    for _ in range(MAX_REPEATS):
        draft = draw(rng)
        key = draft.model_dump_json()
        if key not in drawn:
            drawn.add(key)
            return draft
    raise ProblemError(
        f"environment {name!r} drew {len(drawn)} different problems and then only these "
        f"{MAX_REPEATS} times in a row, wanted more: lower train and held_out of [environments.{name}]"
    )
