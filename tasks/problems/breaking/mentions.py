"""Removes documentation of removed names: paragraphs and items of docstrings and text files, and sections of Markdown."""

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from ostinato.infra.platform.syntax import Defined, walk_definitions
from ostinato.tasks.problems.breaking.candidates import LinePlan

_ITEM = re.compile(r"\s*([-*+|]|\d+[.)])\s")
_CLOSING = re.compile(r"^(\s*).*?(\"\"\"|''')\s*$")


def remove_mentions(
    plan: LinePlan,
    trees: Mapping[str, ast.Module],
    documents: Iterable[str],
    names: Collection[str],
) -> None:
    """Plans the removal of documentation that mentions a name. A name that could be an ordinary word counts only in the
    form of code. `trees`: syntax of the Python files by path. `documents`: paths of text files.
    """
    if not names:
        return
    words = [
        rf"[`.]{name}\b|\b{name}[`(]" if name.islower() and name.isalpha() else rf"\b{name}\b"
        for name in sorted(names)
    ]
    pattern = re.compile("|".join(words))
    for path, tree in trees.items():
        if any(map(pattern.search, plan.lines_of(path))):
            for owner in (tree, *(node for _, node in walk_definitions(tree))):
                _cut_docstring(plan, path, owner, pattern)
    for path in documents:
        for first, last in _find_parts(plan.lines_of(path), 1, len(plan.lines_of(path)), pattern):
            if not plan.is_changed(path, first):
                plan.replace(path, first, _end_section(plan.lines_of(path), first, last))


def _cut_docstring(
    plan: LinePlan, path: str, owner: Defined | ast.Module, pattern: re.Pattern[str]
) -> None:
    """Removes parts of a docstring, or the whole one if its summary mentions a name."""
    match owner.body:
        case [ast.Expr(value=ast.Constant(value=str())) as text, *rest]:
            first, last = text.lineno, text.end_lineno or text.lineno
        case _:
            return
    is_shared = not isinstance(owner, ast.Module) and first == owner.lineno
    if is_shared or any(plan.is_changed(path, number) for number in range(first, last + 1)):
        return  # a definition on one line, or a removed one
    for begin, end in _find_parts(plan.lines_of(path), first, last, pattern):
        if begin == first:
            if rest:
                plan.replace(path, first, last)
            return
        closing = _CLOSING.match(plan.lines_of(path)[last - 1]) if end == last else None
        plan.replace(path, begin, end, ("".join(closing.groups()),) if closing else ())


def _find_parts(
    lines: Sequence[str], first: int, last: int, pattern: re.Pattern[str]
) -> Iterator[tuple[int, int]]:
    """First and last line of each paragraph, list item or table row that mentions a name."""
    begins = [
        number
        for number in range(first, last + 1)
        if number == first or not lines[number - 2].strip() or _ITEM.match(lines[number - 1])
    ]
    for begin, after in zip(begins, [*begins[1:], last + 1], strict=True):
        if any(map(pattern.search, lines[begin - 1 : after - 1])):
            yield begin, after - 1


def _end_section(lines: Sequence[str], first: int, last: int) -> int:
    """Last line of the Markdown section that begins at a line, or `last` if no heading is there."""
    sign = lines[first - 1].partition(" ")[0]
    if sign.strip("#"):
        return last
    for number in range(first + 1, len(lines) + 1):
        other = lines[number - 1].partition(" ")[0]
        if other and not other.strip("#") and len(other) <= len(sign):
            return number - 1
    return len(lines)
