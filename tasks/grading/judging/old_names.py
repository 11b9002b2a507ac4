"""Refactorings: whether product code still has the old name, or a way to reach the symbol under it.

In the original, the old name of a rename occurs nowhere, and the old module of a move does not have the symbol. So only
changed files are read. A change may not gain ways to make names at run time either, since no refactoring needs one. Comments
and docstrings may keep the old name.
"""

import ast
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping

from ostinato.infra.platform.syntax import parse_once
from ostinato.infra.sandbox.environment import open_box
from ostinato.infra.sandbox.function_calls import CallRequest, make_calls
from ostinato.infra.sandbox.repository import PreparedRepository, module_of
from ostinato.tasks.grading.judging.blind_trial import LIMITS
from ostinato.tasks.records import Problem

_MAKES_NAMES = frozenset(
    {
        "globals", "locals", "vars", "setattr", "getattr", "exec", "eval", "compile", "builtins", "importlib",
        "import_module", "modules", "ModuleType", "pickle", "runpy", "timeit", "f_globals", "__dict__", "__getattr__",
        "__getattribute__", "__setattr__", "__import__",
    }
)  # fmt: skip
_NAME = "the name"
_NO_ARGUMENTS = '{"plain": [], "named": {}}'
_CALL_SECONDS = 0.5


async def find_old_name(
    problem: Problem, changed_files: Mapping[str, bytes | None], repository: PreparedRepository
) -> str:
    """The first sign of a refactoring's old name in product code. Empty: none, or the problem is no refactoring."""
    if problem.old_place is None:
        return ""
    old_path, old_name = problem.old_place
    changed = repository.keep_editable(changed_files)
    for path, content in changed.items():
        marks = Counter() if content is None else _marks_of(path, content, problem)
        known = _marks_of(path, repository.files.get(path, b""), problem)
        # a move's users may name the symbol more often than in the original, but no other file may
        gained = {mark for mark in marks - known if mark != _NAME or not known[_NAME]}
        if gained:
            return f"the old name is left: {path} has {min(gained)}, wanted no trace of {old_name} in {old_path}"
    return await _find_at_run_time(problem, changed, repository) if changed else ""


def _marks_of(path: str, content: bytes, problem: Problem) -> Counter[str]:
    """Mentions of the old name by kind, and ways to make names at run time."""
    assert problem.old_place is not None
    old_path, old_name = problem.old_place
    is_move = old_path != problem.path
    module = module_of(old_path).rpartition(".")[2]
    try:
        tree = parse_once(content)
    except (SyntaxError, ValueError):
        return Counter({"text that is not Python": 1})
    identifiers = Counter(_identifiers(tree))
    found = Counter({f"`{name}`": identifiers[name] for name in _MAKES_NAMES & identifiers.keys()})
    found[_NAME] = identifiers[old_name]
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str() as text) if id(node) not in statements:
                found["a text with the name"] += old_name in text
            case ast.ImportFrom(names=aliases):
                names = [alias.name for alias in aliases]
                found["`import *`"] += "*" in names
                is_old = (node.module or "").rpartition(".")[2] == module
                found["an import from the old module"] += is_move and is_old and old_name in names
            case ast.Attribute(
                attr=attribute, value=ast.Name(id=owner) | ast.Attribute(attr=owner)
            ):
                is_old = attribute == old_name and owner == module
                found["a use through the old module"] += is_move and is_old
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
                | ast.Name(id=name, ctx=ast.Store())
            ):
                found["a definition"] += is_move and path != problem.path and name == old_name
    return +found


def _identifiers(tree: ast.Module) -> Iterator[str]:
    """Every identifier, also those within f-strings, in the normal form in which Python compares them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            continue
        for _, value in ast.iter_fields(node):
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str):
                    yield from text.split(".")


async def _find_at_run_time(
    problem: Problem, changed: Mapping[str, bytes | None], repository: PreparedRepository
) -> str:
    """The first module of the problem that answers to the old name otherwise than to a name that nobody knows."""
    assert problem.old_place is not None
    old_path, old_name = problem.old_place
    unknown = f"{old_name}_{secrets.token_hex(8)}"
    paths = [old_path]
    if old_path == problem.path:  # packages export the new name in place of the old one
        broken = problem.break_files(repository.files).keys() - {old_path}
        paths += [path for path in sorted(broken) if path.endswith("__init__.py")]
    calls = [
        CallRequest(path, name, _NO_ARGUMENTS) for path in paths for name in (old_name, unknown)
    ]
    async with open_box(repository, changed, LIMITS) as sandbox:
        results = await make_calls(sandbox, calls, _CALL_SECONDS)
    for path, known, other in zip(paths, results[::2], results[1::2], strict=True):
        if known != other:
            return f"the old name is left: {path} answers to {old_name} at run time"
    return ""
