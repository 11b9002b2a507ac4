"""Parses Python source into syntax trees, from any thread.

CPython 3.11 counts the depth of a tree under construction for the whole process, not for each
thread: two `ast.parse` at once raise `SystemError: AST constructor recursion depth mismatch`
(python/cpython#106905). One lock around the construction keeps them apart; `ast.literal_eval` of a
text builds a tree too.
"""

import ast
import functools
import symtable
import threading
from collections.abc import Iterator
from typing import Any

_construction = threading.Lock()
Defined = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def parse_python(text: str | bytes) -> ast.Module:
    """The tree of `text`. Raises SyntaxError and ValueError as `ast.parse` does, and SyntaxError for a text that is
    nested too deep for the interpreter.
    """
    with _construction:
        try:
            return ast.parse(text)
        except (RecursionError, MemoryError) as error:
            raise SyntaxError(f"nested too deep: {error!r}") from None


def evaluate_literal(literal: ast.expr | str) -> Any:
    """The value of a constant expression. ValueError, TypeError or SyntaxError for any other text."""
    if isinstance(literal, ast.expr):
        return ast.literal_eval(literal)
    body = parse_python(literal).body
    if len(body) != 1 or not isinstance(body[0], ast.Expr):
        raise ValueError(f"{literal[:80]!r} is {len(body)} statements, wanted one constant")
    return ast.literal_eval(body[0].value)


@functools.lru_cache(maxsize=64)
def parse_once(text: str | bytes) -> ast.Module:
    """As `parse_python`, cached. Callers share the tree: only read it."""
    return parse_python(text)


def module_names(text: str) -> set[str]:
    """Names that a module defines or imports at its top, also within `if` and `try`. Raises as `parse_python` does."""
    try:
        table = symtable.symtable(text, "<module>", "exec")
    except (RecursionError, MemoryError) as error:
        raise SyntaxError(f"nested too deep: {error!r}") from None
    return {
        symbol.get_name()
        for symbol in table.get_symbols()
        if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
    }


def dotted_parts(node: ast.expr) -> tuple[str, ...]:
    """Names of an expression such as `package.module.name`. Empty: it is no such chain."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return (node.id, *reversed(parts)) if isinstance(node, ast.Name) else ()


def walk_definitions(tree: ast.Module) -> Iterator[tuple[str, Defined]]:
    """Functions, methods and classes with their qualified names, in file order.

    Definitions within an `if` or `try` of a module or class are included, those within a function are not.
    """
    # a list and no recursion, since each `elif` is an `if` within the one before
    following: list[tuple[ast.stmt, str]] = [(node, "") for node in reversed(tree.body)]
    while following:
        node, scope = following.pop()
        inner: list[ast.stmt] = []
        if isinstance(node, Defined):
            yield f"{scope}{node.name}", node
            if isinstance(node, ast.ClassDef):
                inner, scope = node.body, f"{scope}{node.name}."
        elif isinstance(node, ast.If | ast.Try):
            inner = [*node.body, *node.orelse]
        following += [(each, scope) for each in reversed(inner)]
