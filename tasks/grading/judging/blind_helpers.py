"""Helpers of tests that stand in files of their own, without what they expect."""

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.grading.judging.blind_tests import make_helpers_blind

_WORD = re.compile(rb"\w+")


def find_helpers(
    repository: PreparedRepository, tests: Iterable[str], *, with_literals: bool
) -> dict[str, bytes]:
    """Files of tests from which the given ones may have code, made blind, with all their functions."""
    waiting = set(tests)
    above = {str(folder) for path in waiting for folder in PurePosixPath(path).parents}
    left = {
        path: _module_of(path)
        for path in repository.files
        if path.endswith(".py") and repository.is_test(path) and path not in waiting
    }
    # the runner and the import system read these without being asked
    waiting |= {
        path
        for path, module in left.items()
        if module == "conftest" or (path.endswith("__init__.py") and _folder_of(path) in above)
    }
    blind: dict[str, bytes] = {}
    while waiting:
        path = waiting.pop()
        if left.pop(path, None) is not None:
            try:
                blind[path] = make_helpers_blind(
                    repository.files[path], with_literals=with_literals
                )
            except (SyntaxError, ValueError, RecursionError):
                continue  # data
        words = {word.decode(errors="replace") for word in _WORD.findall(repository.files[path])}
        waiting |= {other for other, module in left.items() if module in words}
    return blind


def _module_of(path: str) -> str:
    pure = PurePosixPath(path)
    return pure.parent.name if pure.name == "__init__.py" else pure.stem


def _folder_of(path: str) -> str:
    return str(PurePosixPath(path).parent)
