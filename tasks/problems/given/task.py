"""Tasks of other collections as problems: each is an archive in the cache, from which a candidate is made.

An archive holds the whole solved state, the product files of the unsolved state that differ, and the text. A task
is proven like every other problem: its tests fail on the unsolved state and pass on the solved one.
"""

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field

from ostinato.infra.platform.errors import ProblemError
from ostinato.infra.platform.folders import is_below, read_folder, write_folder
from ostinato.infra.platform.git import run_git
from ostinato.infra.platform.record import Record
from ostinato.infra.platform.source_archives import fetch_archive, read_archive, store_archive
from ostinato.infra.sandbox.discovery.layout import ProjectLayout, strip_prefix
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.problems.breaking.candidates import Candidate
from ostinato.tasks.problems.commits import describe_change, diff_blocks
from ostinato.tasks.problems.config import GivenSource, Kind, ProjectSource
from ostinato.tasks.problems.discovery.describing import Project, describe_files
from ostinato.tasks.problems.repositories import prepare_repository
from ostinato.tasks.records import Split

TASK_NAME = r"^[a-z0-9][a-z0-9._-]*$"
_TASK, _SOLVED, _UNSOLVED = "task.json", "solved/", "unsolved/"


class GivenTask(Record):
    """Task as its collection states it. Paths are relative to the project's top folder."""

    name: str = Field(pattern=TASK_NAME)
    origin: str = Field(description="harbor or swe-bench")
    prompt: str = Field(min_length=1)
    fail_to_pass: tuple[str, ...] = ()
    """test ids of pytest; empty: the failing tests are found by running"""
    pass_to_pass: tuple[str, ...] = ()
    package: str = Field(default="", description="name of the project if no metadata states it")
    requires: tuple[str, ...] = Field(default=(), description="packages that the project needs")
    layout: ProjectLayout | None = Field(default=None, description="None: found from the files")


def store_task(
    task: GivenTask,
    solved: Mapping[str, bytes],
    unsolved: Mapping[str, bytes],
    cache: Path,
    split: Split,
) -> tuple[GivenSource, tuple[str, ...]]:
    """Stores the states of a task in the cache, and returns its source with remarks. Both states hold all files of
    the project and the task's tests. ProblemError says why the task cannot become a problem.
    """
    project = _describe(task, solved, cache)
    described = project.source
    prefix = f"{described.stripped_prefix}/" if described.stripped_prefix else ""
    changed = {
        path
        for path in {*solved, *unsolved}
        if path.endswith(".py")
        and solved.get(path) != unsolved.get(path)
        and is_below(path.removeprefix(prefix), described.package_paths)
        and not is_below(path.removeprefix(prefix), described.test_paths)
    }
    if not changed:
        raise ProblemError("its solution changes no Python file of the package")
    if odd := sorted(path for path in changed if path not in solved or path not in unsolved):
        raise ProblemError(f"its solution adds or removes {odd[0]}, wanted changes of files only")
    kept = {f"{_SOLVED}{path}": content for path, content in solved.items()}
    kept |= {f"{_UNSOLVED}{path}": unsolved[path] for path in changed}
    kept[_TASK] = task.model_dump_json().encode()
    archive = store_archive(task.name, kept, cache)
    source = GivenSource.model_validate(
        described.model_dump()
        | archive.model_dump()
        | {"split": split, "distribution": project.distribution}
    )
    return source, project.remarks


def _describe(task: GivenTask, solved: Mapping[str, bytes], cache: Path) -> Project:
    if task.layout is None:
        return describe_files(
            solved, task.name, cache, package=task.package, requires=task.requires
        )
    source = ProjectSource.model_validate(task.layout.model_dump() | {"name": task.name})
    return Project(source=source, distribution=task.package or task.name)


def prepare_given(
    source: GivenSource, cache: Path, directory: Path, installed: Mapping[str, bytes]
) -> tuple[PreparedRepository, Candidate]:
    """The solved state, prepared below `directory`, and the candidate that reverts the solution."""
    kept = read_archive(fetch_archive(source, cache))
    task = GivenTask.model_validate_json(kept[_TASK])
    solved, unsolved = (
        strip_prefix(
            {path[len(top) :]: content for path, content in kept.items() if path.startswith(top)},
            source.stripped_prefix,
        )
        for top in (_SOLVED, _UNSOLVED)
    )
    repository = prepare_repository(
        source, solved, directory, strip_text=False, installed=installed
    )
    blocks = diff_blocks({path: solved[path] for path in unsolved}, unsolved)
    candidate = describe_change(source.name, blocks, solved)
    prefix = f"{source.stripped_prefix}/" if source.stripped_prefix else ""
    failing, passing = (
        tuple(test.removeprefix(prefix) for test in tests)
        for tests in (task.fail_to_pass, task.pass_to_pass)
    )
    tests = {path for path in repository.files if repository.is_test(path)}
    details = {
        "kind": Kind.GIVEN,
        "operator": task.origin,
        "message": task.prompt,
        "test_files": tuple(sorted({test.partition("::")[0] for test in failing} or tests)),
        "named_failing": failing,
        "named_passing": passing,
    }
    return repository, candidate.model_copy(update=details)


def apply_patch(files: Mapping[str, bytes], patch: str) -> dict[str, bytes]:
    """The files after a unified diff with paths a/... and b/... ProblemError says where it does not apply. Only
    paths below the folder can change, since git refuses others.
    """
    if not patch.strip():
        return dict(files)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "files"
        write_folder(folder, files)
        written = Path(place) / "given.patch"
        written.write_text(patch if patch.endswith("\n") else f"{patch}\n")
        run_git(None, "init", "--quiet", "--template=", str(folder))
        run_git(folder, "apply", "--whitespace=nowarn", str(written))
        shutil.rmtree(folder / ".git")
        return read_folder(folder)
