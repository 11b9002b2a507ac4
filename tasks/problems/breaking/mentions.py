"""Removes documentation of removed names: paragraphs of docstrings, comments, sections and paragraphs of text files."""

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from ostinato.infra.platform.syntax import Defined
from ostinato.tasks.problems.breaking.candidates import LinePlan

_ITEM = re.compile(r"\s*([-*+|]|\d+[.)])\s")
_CLOSING = re.compile(r"(\"\"\"|''')\s*$")
_UNDERLINE = re.compile(r"([=\-~^\"'*+])\1{2,}\s*$")


def remove_mentions(
    plan: LinePlan,
    trees: Mapping[str, ast.Module],
    documents: Iterable[str],
    names: Collection[str],
) -> None:
    """Plans the removal of documentation that mentions a name. `trees`: syntax of the Python files by path. `documents`:
    paths of text files.
    """
    if not names:
        return
    pattern = write_pattern(names)
    for path, tree in trees.items():
        lines = plan.lines_of(path)
        if not any(map(pattern.search, lines)):
            continue
        inside: set[int] = set()  # lines of texts, in which # begins no comment
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant | ast.JoinedStr):
                inside.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            elif isinstance(node, Defined | ast.Module):
                _cut_docstring(plan, path, node, pattern)
        for number, line in enumerate(lines, 1):
            is_comment = line.lstrip().startswith("#") and number not in inside
            if is_comment and pattern.search(line):
                plan.replace(path, number, number)
    for path in documents:
        _cut_document(plan, path, pattern)


def write_pattern(names: Collection[str]) -> re.Pattern[str]:
    """A pattern that finds names in prose. A name that could be an ordinary word counts only in the form of code."""
    words = sorted(names, key=lambda name: (-len(name), name))
    ordinary = [re.escape(name) for name in words if name.isalpha() and name.islower()]
    others = [re.escape(name) for name in words if not (name.isalpha() and name.islower())]
    parts = [rf"\b(?:{'|'.join(others)})\b"] if others else []
    if ordinary:
        choice = f"(?:{'|'.join(ordinary)})"
        parts.append(rf"[`.]{choice}\b|\b{choice}[`(]")
    return re.compile("|".join(parts))


def _cut_docstring(
    plan: LinePlan, path: str, owner: Defined | ast.Module, pattern: re.Pattern[str]
) -> None:
    """Removes paragraphs of a docstring, or the whole one if its summary mentions a name."""
    text = owner.body[0] if owner.body else None
    if not (isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)):
        return
    first, last = text.lineno, text.end_lineno or text.lineno
    on_own_lines = isinstance(owner, ast.Module) or first > owner.lineno
    if not isinstance(text.value.value, str) or not on_own_lines:
        return
    if any(plan.is_changed(path, number) for number in range(first, last + 1)):
        return  # its definition is removed
    lines = plan.lines_of(path)
    for start, end in _find_paragraphs(lines, first, last):
        if not any(map(pattern.search, lines[start - 1 : end])):
            continue
        if start == first and len(owner.body) > 1:
            plan.replace(path, first, last)
            return
        for begin, stop in _find_parts(lines, start, end, pattern):
            if stop < last:
                plan.replace(path, begin, stop)
            elif begin > first and (closing := _CLOSING.search(lines[last - 1])):
                indent = len(lines[last - 1]) - len(lines[last - 1].lstrip())
                plan.replace(path, begin, last, (" " * indent + closing[1],))


def _cut_document(plan: LinePlan, path: str, pattern: re.Pattern[str]) -> None:
    """Removes sections with a heading that mentions a name, and other paragraphs that do."""
    lines = plan.lines_of(path)
    marks = {number: _mark_of(lines, number) for number in range(1, len(lines) + 1)}
    seen: list[str] = []
    until = 0  # last line of a removed section
    for number, mark in marks.items():
        if mark and mark not in seen:
            seen.append(mark)
        if not mark or number <= until or not pattern.search(lines[number - 1]):
            continue
        above = seen[: seen.index(mark) + 1]
        ends = [other for other in marks if other > number and marks[other] in above]
        until = (ends[0] if ends else len(lines) + 1) - 1
        plan.replace(path, number, until)
    for start, end in _find_paragraphs(lines, 1, len(lines)):
        for begin, stop in _find_parts(lines, start, end, pattern):
            if not plan.is_changed(path, begin):
                plan.replace(path, begin, stop)


def _mark_of(lines: Sequence[str], number: int) -> str:
    """The form of a heading: its signs in Markdown, the character of its underline elsewhere. Empty: no heading."""
    line = lines[number - 1]
    if line.startswith("#"):
        return line[: len(line) - len(line.lstrip("#"))]
    below = _UNDERLINE.match(lines[number]) if number < len(lines) else None
    return below[1] if below and line.strip() else ""


def _find_paragraphs(lines: Sequence[str], first: int, last: int) -> Iterator[tuple[int, int]]:
    """First and last line of each run of lines that are not blank."""
    start = 0
    for number in range(first, last + 2):
        is_text = number <= last and bool(lines[number - 1].strip())
        if is_text and not start:
            start = number
        elif not is_text and start:
            yield start, number - 1
            start = 0


def _find_parts(
    lines: Sequence[str], start: int, end: int, pattern: re.Pattern[str]
) -> Iterator[tuple[int, int]]:
    """Parts of a paragraph that mention a name: items of a list, or the whole paragraph."""
    numbers = range(start, end + 1)
    items = [number for number in numbers if _ITEM.match(lines[number - 1])]
    begins = sorted({start, *items})
    for begin, after in zip(begins, [*begins[1:], end + 1], strict=True):
        if any(map(pattern.search, lines[begin - 1 : after - 1])):
            yield begin, after - 1
