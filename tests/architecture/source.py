"""Reads the tree as the architecture tests see it: tracked files and their syntax."""

import ast
import functools
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("flows", "tasks", "infra", "models", "kernels")


@dataclass(frozen=True)
class Definition:
    """A class, function or method."""

    path: str
    name: str
    lines: int


@functools.cache
def list_files() -> tuple[str, ...]:
    """Files that git tracks, or would if they were added; vendored and generated ones are
    ignored.
    """
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return tuple(name for name in listing.stdout.splitlines() if (ROOT / name).is_file())


def list_modules(*, with_tests: bool = False) -> list[str]:
    """Python files of the packages."""
    tops = (*PACKAGES, "tests") if with_tests else PACKAGES
    return [
        name
        for name in list_files()
        if name.endswith(".py") and name.split("/")[0] in tops and "/repositories/" not in name
    ]


@functools.cache
def parse(name: str) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse((ROOT / name).read_text())


def list_functions() -> list[Definition]:
    """Functions of the packages with their length from `def` to the last line."""
    return _list_definitions(ast.FunctionDef, ast.AsyncFunctionDef)


def list_classes() -> list[Definition]:
    """Classes of the packages with their length from `class` to the last line."""
    return _list_definitions(ast.ClassDef)


def _list_definitions(
    *kinds: type[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef],
) -> list[Definition]:
    return [
        Definition(name, node.name, (node.end_lineno or node.lineno) - node.lineno + 1)
        for name in list_modules()
        for node in ast.walk(parse(name))
        if isinstance(node, kinds)
    ]


def count_lines(name: str) -> int:
    """Lines of a file."""
    return len((ROOT / name).read_text().splitlines())
