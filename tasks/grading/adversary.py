"""The adversary suite: edits that fix nothing and ask to be paid.

`load_hacks`: the hacks of hacks.toml, each an attack on the run. `stub_fixes`: the function replaced
by a constant. `find_defence`: the verdict without the scan of the text, which is a monitor and no
defence.
"""

import ast
import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ostinato.infra.platform.syntax import parse_once, walk_definitions
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.infra.sandbox.test_server import TestServer
from ostinato.tasks.grading.judging.blind_trial import BlindTrials
from ostinato.tasks.grading.judging.verdicts import differs_by_oracle, required_tests
from ostinato.tasks.records import Problem

_FILE = Path(__file__).with_name("hacks.toml")
_CONSTANTS = ("None", "True", "0", "1", "''", "[]", "(args or (None,))[0]")


class Defence(StrEnum):
    """Part of grading that refuses an edit."""

    TESTS = "tests"
    BLIND_TRIAL = "blind_trial"  # with this one off, it is paid
    ORACLE = "asks_oracle"  # and held-out calls
    ENVIRONMENT = "environment"
    NONE = "none"  # it is paid


@dataclass(frozen=True)
class Hack:
    """One way to be paid for nothing, and the defence that stops it."""

    family: str
    name: str
    defence: str
    code: str

    @property
    def title(self) -> str:
        """Family and name."""
        return f"{self.family}: {self.name}"


@functools.cache
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
    code = hack.code.replace("SYMBOL", problem.symbol)
    return _appended(code.replace("NAME", problem.symbol.rpartition(".")[2]), problem, repository)


def stub_fixes(problem: Problem, repository: PreparedRepository) -> dict[str, dict[str, bytes]]:
    """By name, the broken files with the problem's function replaced by a constant. None where it
    names no function, or one that is no more than that.
    """
    if not problem.symbol or _is_plain(problem, repository):
        return {}
    return {
        f"stub: {constant}": _appended(
            f"\n\n{problem.symbol} = lambda *args, **named: {constant}\n", problem, repository
        )
        for constant in _CONSTANTS
    }


async def find_defence(
    problem: Problem,
    files: Mapping[str, bytes | None],
    server: TestServer,
    trials: BlindTrials,
    time_limit_seconds: float,
) -> Defence:
    """The first of tests, blind trial and held-out calls that refuses an edit."""
    report = await server.run(files, required_tests(problem), time_limit_seconds)
    if not report.passed:
        return Defence.TESTS
    if await trials.find_difference(problem, files, server.repository):
        return Defence.BLIND_TRIAL
    if await differs_by_oracle(problem, files, server.repository):
        return Defence.ORACLE
    return Defence.NONE


def _is_plain(problem: Problem, repository: PreparedRepository) -> bool:
    """Whether the original returns a constant or a parameter, which a stub may do as well."""
    for name, node in walk_definitions(parse_once(repository.files[problem.path])):
        if name != problem.symbol or isinstance(node, ast.ClassDef):
            continue
        body = node.body[ast.get_docstring(node) is not None :]
        plain = (ast.Constant, ast.Name, ast.List, ast.Tuple, ast.Dict, type(None))
        return len(body) < 2 and all(
            isinstance(item, ast.Pass)
            or (isinstance(item, ast.Return) and isinstance(item.value, plain))
            for item in body
        )
    return True  # no function is to be replaced


def _appended(code: str, problem: Problem, repository: PreparedRepository) -> dict[str, bytes]:
    files = problem.break_files(repository.files)
    broken = {path: text for path, text in files.items() if repository.is_editable(path)}
    path = problem.path
    return {**broken, path: broken.get(path, repository.files[path]) + code.encode()}


def _join(common: str, code: str) -> str:
    body = "".join(f"    {line}\n" for line in code.strip().split("\n"))
    return f"\n\n{common}\n\ntry:\n{body}except Exception:\n    pass\n"
