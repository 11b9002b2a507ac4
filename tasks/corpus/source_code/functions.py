"""Functions of source files: general ones without docstrings and comments, those of problem
repositories exactly as the harness shows them. With the problems, repositories and prompts of a built problem set.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ostinato.infra.agent.regions import open_region
from ostinato.infra.platform.errors import ProblemError
from ostinato.infra.platform.syntax import parse_python, walk_definitions
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.corpus.config import FunctionLimits
from ostinato.tasks.problems.published import load_problems, load_repositories
from ostinato.tasks.records import Problem

DEFAULT_PROMPT = "Fix {symbol} in {path}"


@dataclass(frozen=True, slots=True)
class CodeFunction:
    """The lines of one function."""

    path: str
    symbol: str
    lines: tuple[str, ...]

    @property
    def key(self) -> tuple[str, str]:
        """Path and qualified name."""
        return self.path, self.symbol


def extract_functions(text: str, path: str, limits: FunctionLimits) -> Iterator[CodeFunction]:
    """Undecorated top-level functions and methods of a file, without docstrings and comments."""
    try:
        tree = parse_python(text)
    except (SyntaxError, ValueError):
        return
    for symbol, node in walk_definitions(tree):
        if isinstance(node, ast.FunctionDef) and symbol.count(".") <= 1:
            yield from _extract(node, symbol, path, limits)


def _extract(
    node: ast.FunctionDef, symbol: str, path: str, limits: FunctionLimits
) -> Iterator[CodeFunction]:
    if node.decorator_list:
        return
    if ast.get_docstring(node, clean=False) is not None:
        node.body = node.body[1:] or [ast.Pass()]
    indent = "    " * symbol.count(".")  # a method is indented in its class
    lines = tuple(indent + line if line else line for line in ast.unparse(node).split("\n"))
    if limits.accept(lines):
        yield CodeFunction(path, symbol, lines)


def read_function(text: str, path: str, symbol: str) -> CodeFunction:
    """A function of a problem repository as read_file shows it."""
    return CodeFunction(path, symbol, open_region(text, f"{path}::{symbol}").lines)


@dataclass(frozen=True, slots=True)
class ProblemSource:
    """Problems and their repositories."""

    problems: tuple[Problem, ...] = ()
    repositories: Mapping[str, PreparedRepository] | None = None

    def repository(self, name: str) -> PreparedRepository:
        if self.repositories is None or name not in self.repositories:
            raise ProblemError(f"the problem set has no prepared repository {name!r}")
        return self.repositories[name]

    def functions(self, limits: FunctionLimits) -> list[CodeFunction]:
        """The original functions that problems break, each once."""
        functions: list[CodeFunction] = []
        places = sorted({(item.repository, item.path, item.symbol) for item in self.problems})
        for name, path, symbol in places:
            text = self.repository(name).files[path].decode()
            function = read_function(text, path, symbol)
            if limits.accept(function.lines):
                functions.append(function)
        return functions

    def other_functions(self, limits: FunctionLimits) -> list[CodeFunction]:
        """Functions of product files without problems, which are never trained on."""
        used = {(problem.repository, problem.path) for problem in self.problems}
        functions: list[CodeFunction] = []
        for name, repository in sorted((self.repositories or {}).items()):
            for path in sorted(repository.files):
                if not path.endswith(".py") or not repository.is_editable(path):
                    continue
                if (name, path) not in used:
                    text = repository.files[path].decode()
                    functions.extend(extract_functions(text, path, limits))
        return functions

    def prompt_templates(self) -> tuple[str, ...]:
        """The problems' prompts as templates with {symbol} and {path}."""
        templates = {_open_prompt(problem) for problem in self.problems}
        return tuple(sorted(templates - {""})) or (DEFAULT_PROMPT,)


def _open_prompt(problem: Problem) -> str:
    """A prompt as a template. Empty unless it names the function exactly once."""
    prompt = problem.prompt.replace("{", "{{").replace("}", "}}").replace(problem.path, "{path}")
    name = problem.symbol.rpartition(".")[2]
    template, count = re.subn(
        rf"(?<![\w{{]){re.escape(problem.symbol)}(?![\w}}])", "{symbol}", prompt
    )
    if not count:
        template, count = re.subn(rf"(?<![\w{{]){re.escape(name)}(?![\w}}])", "{symbol}", prompt)
    return template if count == 1 else ""


def read_problem_source(directory: Path) -> ProblemSource:
    """Reads the output of the problems stage."""
    return ProblemSource(tuple(load_problems(directory)), load_repositories(directory))
