"""Helpers of tests that stand in files of their own."""

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from ostinato.infra.sandbox.repository import PreparedRepository

_WORD = re.compile(rb"\w+")
_ASSERTION = re.compile(rb"\bdef (assert\w*)")


def find_helpers(repository: PreparedRepository, tests: Iterable[str]) -> set[str]:
    """Files of tests from which the given ones may have code."""
    waiting = set(tests)
    above = {str(folder) for path in waiting for folder in PurePosixPath(path).parents}
    left = {
        path: _module_of(path)
        for path in repository.files
        if path.endswith(".py") and repository.is_test(path) and path not in waiting
    }
    # the runner and the import system read these without being asked
    found = {
        path
        for path, module in left.items()
        if module == "conftest" or (path.endswith("__init__.py") and _folder_of(path) in above)
    }
    waiting |= found
    while waiting:
        words = {
            word.decode(errors="replace") for word in _WORD.findall(repository.files[waiting.pop()])
        }
        named = {path for path, module in left.items() if module in words} - found
        found |= named
        waiting |= named
    return found


def find_own_assertions(repository: PreparedRepository, paths: Iterable[str]) -> frozenset[str]:
    """Names of functions and methods that assert, defined in some files."""
    sources = [repository.files[path] for path in paths]
    return frozenset(name.decode() for source in sources for name in _ASSERTION.findall(source))


def _module_of(path: str) -> str:
    pure = PurePosixPath(path)
    return pure.parent.name if pure.name == "__init__.py" else pure.stem


def _folder_of(path: str) -> str:
    return str(PurePosixPath(path).parent)
