"""Functions of source files: general ones without docstrings and comments, those of problem
repositories exactly as the harness shows them.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from ostinato.infra.agent.regions import open_region
from ostinato.infra.platform.syntax import parse_python, walk_definitions
from ostinato.tasks.corpus.config import FunctionLimits


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
