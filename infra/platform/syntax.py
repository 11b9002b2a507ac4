"""Python source to syntax trees, from any thread.

CPython 3.11 counts the depth of a tree under construction for the whole process, not for each
thread: two `ast.parse` at once raise `SystemError: AST constructor recursion depth mismatch`
(python/cpython#106905). One lock around the construction keeps them apart; `ast.literal_eval` of a
text builds a tree too.
"""

import ast
import functools
import threading
from typing import Any

_construction = threading.Lock()


def parse_python(text: str | bytes, filename: str = "<unknown>") -> ast.Module:
    """The tree of `text`. Raises SyntaxError and ValueError as `ast.parse` does."""
    with _construction:
        return ast.parse(text, filename)


def evaluate_literal(literal: ast.expr | str) -> Any:
    """The value of a constant expression. ValueError, TypeError or SyntaxError where it is none."""
    if isinstance(literal, ast.expr):
        return ast.literal_eval(literal)
    body = parse_python(literal).body
    if len(body) != 1 or not isinstance(body[0], ast.Expr):
        raise ValueError(f"{literal[:80]!r} is {len(body)} statements, wanted one constant")
    return ast.literal_eval(body[0].value)


@functools.lru_cache(maxsize=64)
def parse_once(text: str | bytes) -> ast.Module:
    """As `parse_python`, of texts asked for again and again. Others hold the tree: only read it."""
    return parse_python(text)
