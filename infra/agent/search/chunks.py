"""Cuts files into chunks along their syntax: every line of a file is in exactly one chunk.

Functions are chunks; a class without its methods is a chunk; the rest of a module is
cut at definitions; long chunks and files of unknown languages are cut into windows.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import tree_sitter
import tree_sitter_python

from ostinato.models.search_encoder.code_words import CodeText, describe_code

_PARSER = tree_sitter.Parser(tree_sitter.Language(tree_sitter_python.language()))
_DEFINITIONS = frozenset({"function_definition", "class_definition"})
WINDOW_LINES = 50
LONGEST_CHUNK_LINES = 120
_TITLE_CHARACTERS = 80


@dataclass(frozen=True, slots=True)
class Chunk:
    """Lines first_line..last_line of a file, 1-based and inclusive."""

    path: str
    first_line: int
    last_line: int
    name: str
    """Qualified name of the definition; empty outside definitions."""
    text: str

    @property
    def title(self) -> str:
        """First line that is not blank, stripped and cut to _TITLE_CHARACTERS."""
        stripped = (line.strip() for line in self.text.split("\n"))
        return next((line for line in stripped if line), "")[:_TITLE_CHARACTERS]

    @property
    def code_text(self) -> CodeText:
        return describe_code(self.path, self.name, self.text)


@dataclass(frozen=True, slots=True)
class _Definition:
    first_row: int
    last_row: int
    name: str


def cut_chunks(path: str, text: str) -> list[Chunk]:
    """The chunks of a file. Their texts, joined by newlines, are the file's text."""
    lines = text.split("\n")
    is_python = path.endswith((".py", ".pyi"))
    owners = [0] * len(lines)
    definitions = [_Definition(0, len(lines) - 1, "")]
    if is_python:  # broken code gives a tree with error nodes, never an exception
        definitions += _definitions(_PARSER.parse(text.encode()).root_node, "")
        for number, definition in enumerate(definitions[1:], start=1):
            # inner definitions come after outer ones, so the innermost owns a line
            for row in range(definition.first_row, min(definition.last_row + 1, len(lines))):
                owners[row] = number
    pieces = _pieces(lines, owners, is_cut=is_python)
    return [
        Chunk(path, start + 1, end, definitions[owner].name, "\n".join(lines[start:end]))
        for start, end, owner in pieces
    ]


def _definitions(node: tree_sitter.Node, scope: str) -> Iterator[_Definition]:
    """Functions and classes below a node, outer first. Nested functions belong to the outer."""
    for child in node.named_children:
        inner = child
        if child.type == "decorated_definition":
            wrapped = [part for part in child.named_children if part.type in _DEFINITIONS]
            inner = wrapped[-1] if wrapped else child
        if inner.type in _DEFINITIONS:
            named = inner.child_by_field_name("name")
            name = "" if named is None or named.text is None else named.text.decode()
            qualified = f"{scope}.{name}" if scope else name
            yield _Definition(child.start_point.row, child.end_point.row, qualified)
            if inner.type == "class_definition":
                yield from _definitions(inner, qualified)
        elif child.named_child_count:
            yield from _definitions(child, scope)


def _pieces(lines: list[str], owners: list[int], *, is_cut: bool) -> Iterator[tuple[int, int, int]]:
    """Runs of lines with one owner as (start, end, owner), long ones cut into windows."""
    runs: list[list[int]] = []
    for row, owner in enumerate(owners):
        if runs and runs[-1][2] == owner:
            runs[-1][1] = row + 1
        else:
            runs.append([row, row + 1, owner])
    joined: list[list[int]] = []
    for run in runs:
        if joined and not any(line.strip() for line in lines[run[0] : run[1]]):
            joined[-1][1] = run[1]
        else:
            joined.append(run)
    limit = LONGEST_CHUNK_LINES if is_cut else WINDOW_LINES
    for start, end, owner in joined:
        step = end - start if end - start <= limit else WINDOW_LINES
        for first in range(start, end, max(step, 1)):
            yield first, min(first + step, end), owner
