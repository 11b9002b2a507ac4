"""Callers of functions, where the names in the code alone decide them.

A function has known callers if its name is defined once, and if product code uses the name only in imports,
in `__all__` and in calls within functions. No code runs. Any other use (a value, an attribute of an object, a string, a
decorator, a parameter of that name) makes the callers unknown, and the function is left out.
"""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from ostinato.infra.platform.syntax import Defined, parse_once, walk_definitions
from ostinato.tasks.problems.breaking.definitions import Definition

Callers = dict[Definition, tuple[Definition, ...]]


def find_callers(
    files: Mapping[str, bytes], definitions: Mapping[str, Sequence[Definition]]
) -> Callers:
    """The functions and methods that call each top-level function with known callers. Functions that call themselves
    are left out. `files`: all product code.
    """
    defined: Counter[str] = Counter()
    unknown: set[str] = set()
    callers: dict[str, dict[Definition, None]] = defaultdict(dict)
    if files.keys() != definitions.keys():
        return {}  # a file that cannot be parsed may hold further calls
    for path in sorted(files):
        tree = parse_once(files[path])
        owners = _owners(tree, definitions[path])
        for name, node in _uses(tree):
            owner = owners.get(id(node))
            if node is None or owner is None:
                unknown.add(name)
            else:
                callers[name].setdefault(owner)
        defined.update(node.name for node in ast.walk(tree) if isinstance(node, Defined))
    return {
        item: tuple(callers[item.name])
        for found in definitions.values()
        for item in found
        if item.is_plain
        and defined[item.name] == 1
        and item.name not in unknown
        and item not in callers[item.name]
    }


def _owners(tree: ast.Module, found: Sequence[Definition]) -> dict[int, Definition]:
    """The function or method whose body holds a node, by the node's id. Functions within a function belong to it."""
    by_place = {(item.qualified_name, item.first_line): item for item in found}
    return {
        id(inner): by_place[name, node.lineno]
        for name, node in walk_definitions(tree)
        if not isinstance(node, ast.ClassDef)
        for statement in node.body
        for inner in ast.walk(statement)
    }


def _uses(tree: ast.Module) -> Iterator[tuple[str, ast.AST | None]]:
    """Names with the node that calls them, or None for any other use. Plain imports and `__all__` are no uses."""
    modules = {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    exports = {
        id(item)
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and _is_export(node)
        for item in ast.walk(node)
    }
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name):
                yield name, node if id(node) in called else None
            case ast.Attribute(attr=name, value=ast.Name(id=module)) if module in modules:
                yield name, node if id(node) in called else None
            case ast.Attribute(attr=name) | ast.arg(arg=name) | ast.alias(name=name, asname=str()):
                yield name, None
            case ast.alias(asname=None):
                pass
            case ast.Constant(value=str() as text) if (
                id(node) not in exports and text.isidentifier()
            ):
                yield text, None
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                yield from ((name, None) for name in names)
            case ast.ExceptHandler(name=str() as name) | ast.MatchAs(name=str() as name):
                yield name, None
            case _:
                pass


def _is_export(node: ast.Assign | ast.AugAssign | ast.AnnAssign) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets)
