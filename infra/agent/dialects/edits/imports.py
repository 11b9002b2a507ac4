"""Finds the imports that a file needs for the blocks which replace its functions."""

import ast
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from ostinato.infra.agent.dialects.edits.blocks import IMPORTS
from ostinato.infra.platform.syntax import module_names, parse_once, parse_python


def missing_imports(text: str, blocks: Sequence[Mapping[str, str]]) -> tuple[int, list[str]]:
    """0-based line of a file before which imports belong, and the imports of names that a block's function uses and the
    file does not define. There are none for a file that does not parse or has other line ends. `blocks`: arguments of the
    functions' calls.
    """
    if "\r" in text.replace("\r\n", ""):  # the parser counts it as a line end
        return 0, []
    try:
        defined, at = module_names(text), _first_line(parse_once(text))
    except (SyntaxError, ValueError):
        return 0, []
    added: list[str] = []
    for block in blocks:
        for node in _wanted(block, defined):
            added.append(ast.unparse(node))
            defined |= {_bound(name) for name in node.names}
    return at, added


def _wanted(
    block: Mapping[str, str], defined: Collection[str]
) -> Iterator[ast.Import | ast.ImportFrom]:
    """A block's import statements with the names that its function uses and `defined` lacks."""
    used = {*re.findall(r"\w+", block["new"])}
    for node in parse_python(block[IMPORTS]).body:
        assert isinstance(node, ast.Import | ast.ImportFrom)
        node.names = [name for name in node.names if _bound(name) in used - {*defined}]
        if node.names and not _is_future(node):
            yield node


def _bound(name: ast.alias) -> str:
    """The name that an import defines."""
    return name.asname or name.name.partition(".")[0]


def _first_line(tree: ast.Module) -> int:
    """0-based line of the first statement after the docstring and `from __future__`."""
    statements = [
        node
        for index, node in enumerate(tree.body)
        if not (index == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        and not _is_future(node)
    ]
    if not statements:
        raise ValueError("no statement")
    first = statements[0]
    decorators = getattr(first, "decorator_list", [])
    return min([first.lineno, *(each.lineno for each in decorators)]) - 1


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"
