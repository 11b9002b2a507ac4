"""Column spans of calls, arguments, subscripts, conditions and names that lie within one line."""

import ast
from dataclasses import dataclass, field
from functools import lru_cache

from ostinato.infra.platform.syntax import parse_python

Span = tuple[int, int]  # columns, end exclusive


@dataclass(slots=True)
class CallParts:
    """A call with the spans of its positional and keyword arguments, in order."""

    whole: Span
    arguments: list[Span]
    num_positional: int


@dataclass(slots=True)
class LineParts:
    """Names and expressions on one line."""

    names: list[Span] = field(default_factory=list)
    attributes: list[Span] = field(default_factory=list)
    integers: list[Span] = field(default_factory=list)
    calls: list[CallParts] = field(default_factory=list)
    subscripts: list[Span] = field(default_factory=list)  # from the bracket on
    conditions: list[tuple[Span, bool]] = field(default_factory=list)  # and whether it is compound
    statement: Span | None = None  # a simple statement that fills the line
    returned: Span | None = None  # the value of a return statement


@lru_cache(maxsize=4096)
def find_parts(lines: tuple[str, ...]) -> tuple[LineParts, ...]:
    """The parts of each line. SyntaxError when the lines are not a function."""
    is_indented = lines[0][:1] == " "  # a method, indented as in its class
    text = "\n".join(("if True:", *lines) if is_indented else lines)
    finder = _Finder([LineParts() for _ in lines], 2 if is_indented else 1)
    if text.isascii():  # columns of the syntax tree count bytes
        for node in ast.walk(parse_python(text)):
            finder.visit(node)
    return tuple(finder.parts)


@dataclass(slots=True)
class _Finder:
    parts: list[LineParts]
    first_line: int

    def visit(self, node: ast.AST) -> None:
        """Notes what one node says about its line."""
        match node:
            case ast.Name():
                self._line(node).names.append(_span(node))
            case ast.Constant() if type(node.value) is int and _is_flat(node):
                self._line(node).integers.append(_span(node))
            case ast.Attribute() if _is_flat(node):
                start = _span(node)[1] - len(node.attr)
                self._line(node).attributes.append((start, _span(node)[1]))
            case ast.Subscript() if _is_flat(node):
                start = node.value.end_col_offset
                assert start is not None
                self._line(node).subscripts.append((start, _span(node)[1]))
            case ast.Call() if _is_flat(node):
                self._visit_call(node)
            case ast.If() | ast.While() | ast.IfExp() if _is_flat(node.test):
                is_compound = isinstance(node.test, (ast.Compare, ast.BoolOp))
                self._line(node.test).conditions.append((_span(node.test), is_compound))
            case ast.Return() | ast.Assign() | ast.AugAssign() | ast.Expr() | ast.Delete():
                self._visit_statement(node)

    def _visit_call(self, node: ast.Call) -> None:
        arguments = [_span(argument) for argument in node.args]
        arguments += [_keyword_span(keyword) for keyword in node.keywords]
        self._line(node).calls.append(CallParts(_span(node), arguments, len(node.args)))

    def _visit_statement(self, node: ast.stmt) -> None:
        if not _is_flat(node):
            return
        line = self._line(node)
        line.statement = _span(node)
        if isinstance(node, ast.Return) and node.value is not None:
            line.returned = _span(node.value)

    def _line(self, node: ast.expr | ast.stmt) -> LineParts:
        return self.parts[node.lineno - self.first_line]


def _keyword_span(keyword: ast.keyword) -> Span:
    return keyword.col_offset, _span(keyword.value)[1]


def _is_flat(node: ast.expr | ast.stmt) -> bool:
    return node.lineno == node.end_lineno


def _span(node: ast.expr | ast.stmt) -> Span:
    assert node.end_col_offset is not None
    return node.col_offset, node.end_col_offset
