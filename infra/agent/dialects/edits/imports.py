"""The edit that gives a file the imports of the blocks which replace its functions."""

import ast
import re
import symtable
from collections.abc import Collection, Iterator, Mapping, Sequence

from ostinato.infra.agent.dialects.edits.blocks import IMPORTS
from ostinato.infra.platform.syntax import parse_once, parse_python


def edit_of_imports(text: str, blocks: Sequence[Mapping[str, str]]) -> tuple[str, str] | None:
    """Old and new text of the edit of a file. Added are imports of names that a block's function uses and the file does
    not define. None if there are none, or the file does not parse. `blocks`: arguments of the calls of the functions.
    """
    try:
        defined = {
            symbol.get_name()
            for symbol in symtable.symtable(text, "file", "exec").get_symbols()
            if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
        }
        at = _first_line(parse_once(text))
    except (SyntaxError, ValueError):
        return None
    added: list[str] = []
    for block in blocks:
        for node in _wanted(block, defined):
            added.append(ast.unparse(node))
            defined |= {_bound(name) for name in node.names}
    if not added:
        return None
    lines = text.split("\n")
    ending = "\r" if lines[0].endswith("\r") else ""
    end = at + 1
    while text.count("\n".join(lines[:end])) > 1:  # an edit takes a text that occurs once
        end += 1
    statements = [f"{line}{ending}" for line in added]
    return "\n".join(lines[:end]), "\n".join([*lines[:at], *statements, *lines[at:end]])


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
    """0-based line of the first import, else of the first statement, after the docstring and `from __future__`."""
    statements = [
        node
        for index, node in enumerate(tree.body)
        if not (index == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        and not _is_future(node)
    ]
    imports = [node for node in statements if isinstance(node, ast.Import | ast.ImportFrom)]
    first = (imports or statements)[0]
    decorators = getattr(first, "decorator_list", [])
    return min([first.lineno, *(each.lineno for each in decorators)]) - 1


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"
