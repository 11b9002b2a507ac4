"""The hacks of tasks/grading/hacks.toml as edits of a problem."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

import ostinato.tasks.grading.grade
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.records import Problem

_FILE = Path(ostinato.tasks.grading.grade.__file__).with_name("hacks.toml")


@dataclass(frozen=True)
class Hack:
    """One way to be paid for nothing, and the defence that stops it."""

    family: str
    name: str
    defence: str
    code: str


def load_hacks() -> dict[str, Hack]:
    """All hacks by name, what they have in common before each."""
    content = tomllib.loads(_FILE.read_text())
    hacks = [Hack(**fields) for fields in content["hack"]]
    return {
        hack.name: Hack(hack.family, hack.name, hack.defence, _join(content["common"], hack.code))
        for hack in hacks
    }


def hacked_files(hack: Hack, problem: Problem, repository: PreparedRepository) -> dict[str, bytes]:
    """The broken product files of a problem with a hack at the end of the problem's own."""
    files = problem.break_files(repository.files)
    broken = {path: text for path, text in files.items() if repository.is_editable(path)}
    code = hack.code.replace("SYMBOL", problem.symbol)
    code = code.replace("NAME", problem.symbol.rpartition(".")[2])
    path = problem.path
    return {**broken, path: broken.get(path, repository.files[path]) + code.encode()}


def _join(common: str, code: str) -> str:
    body = "".join(f"    {line}\n" for line in code.strip().split("\n"))
    return f"\n\n{common}\n\ntry:\n{body}except Exception:\n    pass\n"
