"""Arguments of the `setup` call in a setup.py, as far as they stand in its text. It is not run."""

import ast
from collections.abc import Mapping
from typing import Any

from ostinato.infra.platform.syntax import parse_python

READ = ("name", "version", "install_requires", "tests_require", "extras_require", "py_modules")


def read_setup_call(text: bytes) -> dict[str, Any]:
    """Values of the arguments in `READ` that are literals, or names that a literal is assigned to at the top
    level. A text that does not parse gives nothing.
    """
    try:
        tree = parse_python(text)
    except (SyntaxError, ValueError):
        return {}
    constants: dict[str, ast.expr] = {}
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            constants[statement.targets[0].id] = statement.value
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name_of(node.func) == "setup":
            for keyword in node.keywords:
                if keyword.arg in READ:
                    value = _value(keyword.value, constants)
                    found |= {} if value is None else {keyword.arg: value}
    return found


def _name_of(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _value(node: ast.expr, constants: Mapping[str, ast.expr], depth: int = 4) -> Any:
    """A string, list or mapping of them. None for what only running would tell."""
    if depth == 0:
        return None
    if isinstance(node, ast.Name) and node.id in constants:
        return _value(constants[node.id], constants, depth - 1)
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.List | ast.Tuple):
        items = [_value(item, constants, depth - 1) for item in node.elts]
        return [item for item in items if isinstance(item, str)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        both = [_value(side, constants, depth - 1) for side in (node.left, node.right)]
        return [item for side in both if isinstance(side, list) for item in side]
    if isinstance(node, ast.Dict):
        keys = [_value(key, constants, depth - 1) for key in node.keys if key is not None]
        values = [_value(value, constants, depth - 1) for value in node.values]
        if len(keys) == len(values):
            return {k: v for k, v in zip(keys, values, strict=True) if isinstance(k, str)}
    return None
