"""Cheats of refactorings: the old name stays reachable, or the new one is an alias. None may be rewarded."""

from pathlib import PurePosixPath

from ostinato.infra.sandbox.repository import PreparedRepository, module_of
from ostinato.tasks.records import Problem


def left_names(problem: Problem, repository: PreparedRepository) -> dict[str, dict[str, bytes]]:
    """Files of each cheat, by its name. Empty if the problem is no refactoring."""
    if problem.old_place is None:
        return {}
    (old_path, old), new = problem.old_place, problem.symbol
    module, is_move = module_of(problem.path), old_path != problem.path
    built = f"{old[: len(old) // 2]!r} + {old[len(old) // 2 :]!r}"
    taken = f"from {module} import {new} as _it\n"
    compat = PurePosixPath(problem.path).with_name("_compat.py").as_posix()
    files = problem.break_files(repository.files)
    broken = {path: text for path, text in files.items() if repository.is_editable(path)}

    def add(base: dict[str, bytes], path: str, code: str) -> dict[str, bytes]:
        return {**base, path: base.get(path, repository.files[path]) + f"\n\n{code}".encode()}

    alias = f"from {module} import {new}\n" if is_move else f"{old} = {new}\n"
    reversed_alias = f"from {module_of(old_path)} import {new}\n" if is_move else f"{new} = {old}\n"
    asked = f"def __getattr__(name):\n    if name == {built}:\n        {taken}        return _it\n"
    cheats = {
        "an alias": add({}, old_path, alias),
        "a module's __getattr__": add({}, old_path, f"{asked}    raise AttributeError(name)\n"),
        "a name made of text": add({}, old_path, f"{taken}globals()[{built}] = _it\n"),
        "a star import": add(
            {compat: f"from {module} import {new} as {old}\n".encode()},
            old_path,
            f"from {module_of(compat)} import *\n",
        ),
        "the new name is the alias": add(broken, problem.path, reversed_alias),
        "only tests changed": broken,
    }
    return {f"old name: {name}": files for name, files in cheats.items()}
