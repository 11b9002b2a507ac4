"""Functions, methods and classes of product code with their lines and users. No code runs, so a name refers to
every definition of that name.
"""

import ast
import bisect
import contextlib
import io
import itertools
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ostinato.infra.platform.syntax import Defined, parse_python, walk_definitions

_LONE_RETURN = re.compile(rb"\r(?!\n)")
CallKey = tuple[str, int, str]  # path, first line with decorators, qualified name


@dataclass(frozen=True)
class Definition:
    """One function, method or class. Lines are 1-based in the file and inclusive."""

    path: str
    qualified_name: str
    is_class: bool
    decorator_line: int  # line of the first decorator, or first_line
    first_line: int  # line of `def` or `class`
    docstring_line: int  # first line of the docstring; 0: no docstring
    body_line: int  # first line after signature and docstring; 0: only a docstring
    last_line: int
    indent: int  # columns before `def`
    body_indent: int
    is_one_liner: bool  # the body is on the line of the signature

    @property
    def name(self) -> str:
        return self.qualified_name.rpartition(".")[2]

    @property
    def is_method(self) -> bool:
        return "." in self.qualified_name

    @property
    def is_public(self) -> bool:
        """Whether no part of the qualified name begins with an underscore."""
        return not any(part.startswith("_") for part in self.qualified_name.split("."))

    @property
    def num_lines(self) -> int:
        """Lines of the definition, decorators included."""
        return self.last_line - self.decorator_line + 1

    @property
    def call_key(self) -> CallKey:
        """Key of this function in the profile of a test."""
        return (self.path, self.decorator_line, self.qualified_name)

    @property
    def is_plain(self) -> bool:
        """Whether it is an undecorated function at the top level of its module."""
        return not (self.is_class or self.is_method or self.decorator_line < self.first_line)

    def contains(self, line_number: int) -> bool:
        return self.decorator_line <= line_number <= self.last_line


def find_definitions(path: str, text: str) -> list[Definition]:
    """Definitions of a module in file order, without those inside functions."""
    return [_define(path, name, node) for name, node in walk_definitions(parse_python(text))]


def read_definitions(files: Mapping[str, bytes]) -> dict[str, list[Definition]]:
    """Definitions by file. Files that this Python cannot parse, or not in UTF-8, are left out, and files in which a
    carriage return alone ends a line, since edits count lines by their line feeds.
    """
    found: dict[str, list[Definition]] = {}
    for path, content in files.items():
        if _LONE_RETURN.search(content):
            continue
        with contextlib.suppress(SyntaxError, ValueError):
            found[path] = find_definitions(path, content.decode())
    return found


def _define(path: str, qualified_name: str, node: Defined) -> Definition:
    first, *rest = node.body
    has_docstring = (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    )
    last_line = node.end_lineno or node.lineno
    body: ast.stmt | None = (rest[0] if rest else None) if has_docstring else first
    body_line = 0 if body is None else _first_line(body)
    if has_docstring and body_line:  # comments before the first statement are part of the body
        body_line = (first.end_lineno or first.lineno) + 1
    return Definition(
        path=path,
        qualified_name=qualified_name,
        is_class=isinstance(node, ast.ClassDef),
        decorator_line=_first_line(node),
        first_line=node.lineno,
        docstring_line=first.lineno if has_docstring else 0,
        body_line=body_line,
        last_line=last_line,
        indent=node.col_offset,
        body_indent=first.col_offset,
        is_one_liner=first.lineno == node.lineno,
    )


def _first_line(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def lines_at_margin(definition: Definition, lines: Sequence[str]) -> list[str] | None:
    """The lines of a function without its indentation, as mutation operators need them.

    None for classes, coroutines and functions that cannot be dedented line by line.
    """
    own = lines[definition.first_line - 1 : definition.last_line]
    margin = " " * definition.indent
    if definition.is_class or not own[0].startswith(f"{margin}def "):
        return None
    if any(line.strip() and not line.startswith(margin) for line in own):
        return None  # a multi-line string contains text at the left margin
    return [line.removeprefix(margin) for line in own]


class NameGraph:
    """Occurrences of names in product code, and helpers that only certain definitions use."""

    def __init__(
        self, files: Mapping[str, bytes], definitions: Mapping[str, Sequence[Definition]]
    ) -> None:
        self._places: dict[str, list[tuple[str, int]]] = defaultdict(list)
        self._by_name: dict[str, list[Definition]] = defaultdict(list)
        for found in definitions.values():
            for definition in found:
                self._by_name[definition.name].append(definition)
        self._mentions: dict[str, list[tuple[int, str]]] = {}  # defined names with their lines
        for path in sorted(files):
            text = files[path].decode(errors="replace")
            exported = _export_lines(text)
            for name, line in read_names(text):
                if line not in exported:
                    self._places[name].append((path, line))
            self._mentions[path] = [
                (line, name) for name, line in read_names(text) if name in self._by_name
            ]

    def helpers_of(self, roots: Iterable[Definition], named: frozenset[str]) -> list[Definition]:
        """`roots` and the definitions used only by them and by one another. Names in `named` are no helpers."""
        group = list(roots)
        grows = True
        while grows:
            grows = False
            for definition in self._used_by(group):
                if definition not in group and self._is_only_used_by(definition, group, named):
                    group.append(definition)
                    grows = True
        return [item for item in group if not _is_inside_another(item, group)]

    def users_of(self, name: str, outside: Sequence[Definition]) -> list[tuple[str, int]]:
        """Places outside of some definitions that mention a name."""
        return [
            (path, line)
            for path, line in self._places.get(name, [])
            if not any(item.path == path and item.contains(line) for item in outside)
        ]

    def _used_by(self, group: Sequence[Definition]) -> list[Definition]:
        used: dict[Definition, None] = {}
        for item in group:
            mentions = self._mentions.get(item.path, [])
            start = bisect.bisect_left(mentions, (item.decorator_line, ""))
            for line, name in itertools.islice(mentions, start, None):
                if line > item.last_line:
                    break
                used.update(dict.fromkeys(self._by_name[name]))
        return list(used)

    def _is_only_used_by(
        self, definition: Definition, group: Sequence[Definition], named: frozenset[str]
    ) -> bool:
        name = definition.name
        is_plain = not (name.startswith("__") and name.endswith("__"))
        if not is_plain or name in named or len(self._by_name[name]) > 1:
            return False
        return not self.users_of(name, [*group, definition])


def _is_inside_another(definition: Definition, group: Sequence[Definition]) -> bool:
    return any(
        other is not definition
        and other.path == definition.path
        and other.is_class
        and other.contains(definition.first_line)
        for other in group
    )


def read_names(text: str) -> list[tuple[str, int]]:
    """Every name of a source text with its line, without names inside strings."""
    try:
        return [
            (token.string, token.start[0])
            for token in tokenize.generate_tokens(io.StringIO(text).readline)
            if token.type == tokenize.NAME
        ]
    except (tokenize.TokenError, SyntaxError):
        return []


def _names(node: ast.AST) -> set[str]:
    found = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return found | {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}


def _export_lines(text: str) -> frozenset[int]:
    """Lines of top-level imports and of `__all__`, which pass names on without using them."""
    lines: set[int] = set()
    for node in parse_python(text).body:
        is_all = isinstance(node, (ast.Assign, ast.AugAssign)) and "__all__" in _names(node)
        if is_all or isinstance(node, (ast.Import, ast.ImportFrom)):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return frozenset(lines)


def find_callers(
    files: Mapping[str, bytes], definitions: Mapping[str, Sequence[Definition]]
) -> dict[Definition, tuple[Definition, ...]]:
    """The functions and methods that call each top-level function, where names alone tell: the name is defined once, and
    every other use of it is a plain import, an entry of `__all__` or a call within a function. Functions that call
    themselves are left out. `files`: all product code; if some of it has no definitions, it cannot be read.
    """
    uses: Counter[str] = Counter()
    calls: dict[str, list[Definition]] = defaultdict(list)
    for path in sorted(files) if files.keys() == definitions.keys() else ():
        text, functions = files[path].decode(), [it for it in definitions[path] if not it.is_class]
        exported, tree = _export_lines(text), parse_python(text)
        uses.update(name for name, line in read_names(text) if line not in exported)
        imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        modules = {
            (it.asname or it.name).partition(".")[0] for node in imports for it in node.names
        }
        for node in ast.walk(tree):
            match node:
                case ast.alias(name=name, asname=str()):
                    uses[name] += 1
                case ast.Constant(value=str() as name) if node.lineno not in exported:
                    uses[name] += 1
                case ast.Call(func=ast.Name(id=name)):
                    calls[name] += [it for it in functions if _has_in_body(it, node.lineno)]
                case ast.Call(func=ast.Attribute(attr=name, value=ast.Name(id=module))):
                    found = functions if module in modules else ()
                    calls[name] += [it for it in found if _has_in_body(it, node.lineno)]
    return {
        item: tuple(dict.fromkeys(calls[item.name]))
        for found in definitions.values()
        for item in found
        if item.is_plain and uses[item.name] == len(calls[item.name]) + 1
        if item not in calls[item.name]
    }


def _has_in_body(definition: Definition, line: int) -> bool:
    """Whether a line is in the body of a function. Never if the body is on the line of the signature."""
    return not definition.is_one_liner and 0 < definition.body_line <= line <= definition.last_line
