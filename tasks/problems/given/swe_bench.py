"""Instances of SWE-bench, read from a file and from clones on this machine.

An instance is a row with `repo`, `base_commit`, `patch`, `test_patch`, `problem_statement`, FAIL_TO_PASS and
PASS_TO_PASS (lists, or JSON of lists). Its environment is this Python with the packages that the project's metadata
names. Images of SWE-bench are not used, so the proof fails for an instance that needs an old interpreter or
compiled code.
"""

import re
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator

from ostinato.infra.platform.bounded_files import parse_json
from ostinato.infra.platform.errors import ConfigError, ProblemError
from ostinato.infra.platform.git import read_tree
from ostinato.infra.platform.record import Record
from ostinato.infra.platform.row_files import read_rows
from ostinato.tasks.problems.given.task import TASK_NAME, GivenTask, apply_patch
from ostinato.tasks.problems.repositories import MAX_FILE_BYTES

_MARK = "instance_id"
_SUFFIXES = (".json", ".jsonl", ".parquet")
_TEST_ID = re.compile(r"[^\s:]+\.py::\S.*")


class Instance(Record):
    """One row of the file. Other columns are ignored."""

    instance_id: str
    repo: str = Field(pattern=r"^[\w.-]+/[\w.-]+$")
    base_commit: str = Field(pattern=r"^[0-9a-f]{7,64}$")
    patch: str = Field(min_length=1)
    test_patch: str
    problem_statement: str = Field(min_length=1)
    fail_to_pass: tuple[str, ...] = Field(min_length=1)
    pass_to_pass: tuple[str, ...] = ()

    @field_validator("fail_to_pass", "pass_to_pass", mode="before")
    @classmethod
    def _load(cls, value: Any) -> Any:
        return (
            parse_json("the list of tests", value, ValueError) if isinstance(value, str) else value
        )


def is_instances(path: Path) -> bool:
    """Whether a file has a suffix of files with instances."""
    return path.is_file() and path.suffix in _SUFFIXES


def read_instances(path: Path) -> list[Instance]:
    """The instances of a file. ConfigError names the row and its fault."""
    found: list[Instance] = []
    for number, row in read_rows(path, _SUFFIXES):
        if not isinstance(row, dict) or _MARK not in row:
            raise ConfigError(f"{path}, row {number}: no {_MARK}, wanted instances of SWE-bench")
        lowered = {str(name).lower(): value for name, value in row.items()}
        wanted = {name: lowered[name] for name in Instance.model_fields if name in lowered}
        try:
            found.append(Instance.model_validate(wanted))
        except ValidationError as error:
            raise ConfigError(f"{path}, row {number}, {row[_MARK]}: {error}") from None
    return found


def take_instance(
    instance: Instance, clones: Path
) -> tuple[GivenTask, dict[str, bytes], dict[str, bytes]]:
    """The task of an instance, its solved and its unsolved state. ProblemError says why it is refused."""
    odd = [test for test in instance.fail_to_pass if not _TEST_ID.fullmatch(test)]
    if odd:
        raise ProblemError(f"its test {odd[0]!r} is no test id of pytest, wanted FILE.py::NAME")
    name = instance.instance_id.lower()
    if not re.fullmatch(TASK_NAME, name):
        raise ProblemError(
            f"its instance_id is {instance.instance_id!r}, wanted letters, digits, '.', '_' and '-'"
        )
    clone = _find_clone(instance.repo, clones)
    before = read_tree(clone, instance.base_commit, max_file_bytes=MAX_FILE_BYTES)
    unsolved = apply_patch(before, instance.test_patch)
    task = GivenTask(
        name=name,
        origin="swe-bench",
        prompt=instance.problem_statement.strip(),
        fail_to_pass=instance.fail_to_pass,
        pass_to_pass=instance.pass_to_pass,
        package=instance.repo.partition("/")[2],
    )
    return task, apply_patch(unsolved, instance.patch), unsolved


def _find_clone(repo: str, clones: Path) -> Path:
    owner, _, name = repo.partition("/")
    for folder in (f"{owner}__{name}", f"{owner}/{name}", name):
        for place in (clones / folder, clones / f"{folder}.git"):
            if (place / ".git").exists() or (place / "HEAD").is_file():
                return place
    raise ProblemError(f"no clone of {repo} below {clones}, wanted {owner}__{name} or {name}")
