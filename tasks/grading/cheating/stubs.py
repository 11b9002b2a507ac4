"""Stubs: a constant in place of a problem's function. Tests that a stub passes prove nothing."""

import ast

from ostinato.infra.platform.syntax import parse_once, walk_definitions
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.records import Problem

_CONSTANTS = ("None", "True", "0", "1", "''", "[]", "(args or (None,))[0]")


def stub_fixes(problem: Problem, repository: PreparedRepository) -> dict[str, dict[str, bytes]]:
    """Broken files with a constant in place of the problem's function, by name of the stub. Empty if the problem
    names no function, or the function only returns a constant or a parameter.
    """
    if not problem.symbol or _is_plain(problem, repository):
        return {}
    return {
        f"stub: {constant}": append_code(
            f"\n\n{problem.symbol} = lambda *args, **named: {constant}\n", problem, repository
        )
        for constant in _CONSTANTS
    }


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
    return True  # the symbol is no function


def append_code(code: str, problem: Problem, repository: PreparedRepository) -> dict[str, bytes]:
    """The broken product files of a problem, with code appended to the problem's file."""
    files = problem.break_files(repository.files)
    broken = {path: text for path, text in files.items() if repository.is_editable(path)}
    path = problem.path
    return {**broken, path: broken.get(path, repository.files[path]) + code.encode()}
