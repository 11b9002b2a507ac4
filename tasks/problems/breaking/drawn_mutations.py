"""Single-line bugs drawn at random, similar to those of people: the code still compiles, and tests may miss the bug.

`mutate_function` (mutations.py) lists every bug of a function for problems. This module draws single bugs in
microseconds for the documents of a corpus, which need hundreds of thousands.
"""

import ast
import builtins
import keyword
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from ostinato.infra.platform.syntax import parse_python
from ostinato.tasks.problems.breaking.mutations import Mutation

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
    subscripts: list[Span] = field(default_factory=list)  # from the opening bracket
    conditions: list[tuple[Span, bool]] = field(default_factory=list)  # with whether it is compound
    statement: Span | None = None  # a simple statement that fills the line
    returned: Span | None = None  # the value of a return statement


@lru_cache(maxsize=4096)
def find_parts(lines: tuple[str, ...]) -> tuple[LineParts, ...]:
    """The parts of each line. SyntaxError if the lines do not parse."""
    is_indented = lines[0][:1] == " "  # a method, indented as in its class
    text = "\n".join(("if True:", *lines) if is_indented else lines)
    finder = _Finder([LineParts() for _ in lines], 2 if is_indented else 1)
    if text.isascii():  # because columns of the syntax tree count bytes
        for node in ast.walk(parse_python(text)):
            finder.visit(node)
    return tuple(finder.parts)


@dataclass(slots=True)
class _Finder:
    parts: list[LineParts]
    first_line: int

    def visit(self, node: ast.AST) -> None:
        """Records the parts that one node adds to its line."""
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
        arguments += [(keyword.col_offset, _span(keyword.value)[1]) for keyword in node.keywords]
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


def _is_flat(node: ast.expr | ast.stmt) -> bool:
    return node.lineno == node.end_lineno


def _span(node: ast.expr | ast.stmt) -> Span:
    assert node.end_col_offset is not None
    return node.col_offset, node.end_col_offset


@dataclass(frozen=True, slots=True)
class _Line:
    text: str
    parts: LineParts
    names: tuple[str, ...]  # all names of the function that are not built in

    def word(self, span: Span) -> str:
        return self.text[span[0] : span[1]]

    def replace(self, span: Span, new: str) -> str:
        return self.text[: span[0]] + new + self.text[span[1] :]


Operator = Callable[[_Line, random.Random], str | None]
# A word is replaced by the other word of its pair.
_WORDS = (
    ("==", "!="),
    ("<=", "<"),
    (">=", ">"),
    ("<", ">"),
    ("+", "-"),
    ("*", "+"),
    ("/", "//"),
    ("+=", "-="),
    ("and", "or"),
    ("is not", "is"),
    ("not in", "in"),
    ("True", "False"),
    ("yield", "return"),
    ("continue", "break"),
)
_SIBLINGS = (
    ("items()", "keys()", "values()"),
    ("append(", "extend("),
    ("zip(", "zip_longest("),
    ("any(", "all("),
    ("min(", "max("),
    ("map(", "starmap("),
    ("filter(", "filterfalse("),
    ("union", "intersection"),
    ("lower()", "upper()"),
    ("startswith", "endswith"),
    ("lstrip", "rstrip"),
    ("popleft", "pop"),
)


def _wrong_name(line: _Line, rng: random.Random) -> str | None:
    if not line.parts.names:
        return None
    span = rng.choice(line.parts.names)
    others = [name for name in line.names if name != line.word(span)]
    return line.replace(span, rng.choice(others)) if others else None


def _misspell(word: str, rng: random.Random) -> str:
    index = rng.randrange(len(word))
    draw = rng.random()
    if len(word) > 2 and draw < 0.4:
        return word[:index] + word[index + 1 :]
    if index + 1 < len(word) and word[index] != word[index + 1] and draw < 0.8:
        return word[:index] + word[index + 1] + word[index] + word[index + 2 :]
    return word[: index + 1] + word[index:]


def _misspelt(line: _Line, spans: Sequence[Span], rng: random.Random) -> str | None:
    if not spans:
        return None
    span = rng.choice(spans)
    return line.replace(span, _misspell(line.word(span), rng))


def _sibling(line: _Line, rng: random.Random) -> str | None:
    found = [(word, group) for group in _SIBLINGS for word in group if word in line.text]
    if not found:
        return None
    word, group = rng.choice(found)
    return line.text.replace(word, rng.choice([other for other in group if other != word]), 1)


def _swapped_word(line: _Line, rng: random.Random) -> str | None:
    padded = f"{line.text} "
    found = [
        (f" {old} ", f" {new} ")
        for pair in _WORDS
        for old, new in (pair, pair[::-1])
        if f" {old} " in padded
    ]
    if not found:
        return None
    old, new = rng.choice(found)
    return padded.replace(old, new, 1)[:-1]


def _wrong_integer(line: _Line, rng: random.Random) -> str | None:
    if not line.parts.integers:
        return None
    span = rng.choice(line.parts.integers)
    if not line.word(span).isdigit():
        return None
    return line.replace(span, str(abs(int(line.word(span)) + rng.choice((-1, 1)))))


def _unwrapped_call(line: _Line, rng: random.Random) -> str | None:
    calls = [call for call in line.parts.calls if call.num_positional]
    if not calls:
        return None
    call = rng.choice(calls)
    return line.replace(call.whole, line.word(rng.choice(call.arguments[: call.num_positional])))


def _dropped_argument(line: _Line, rng: random.Random) -> str | None:
    calls = [call for call in line.parts.calls if call.arguments]
    if not calls:
        return None
    call = rng.choice(calls)
    dropped = rng.randrange(len(call.arguments))
    kept = [line.word(span) for index, span in enumerate(call.arguments) if index != dropped]
    return line.replace((call.arguments[0][0], call.arguments[-1][1]), ", ".join(kept))


def _swapped_arguments(line: _Line, rng: random.Random) -> str | None:
    calls = [call for call in line.parts.calls if call.num_positional > 1]
    if not calls:
        return None
    call = rng.choice(calls)
    index = rng.randrange(call.num_positional - 1)
    first, second = call.arguments[index], call.arguments[index + 1]
    between = line.text[first[1] : second[0]]
    return line.replace((first[0], second[1]), line.word(second) + between + line.word(first))


def _dropped_subscript(line: _Line, rng: random.Random) -> str | None:
    subscripts = line.parts.subscripts
    return line.replace(rng.choice(subscripts), "") if subscripts else None


def _negated_condition(line: _Line, rng: random.Random) -> str | None:
    if not line.parts.conditions:
        return None
    span, is_compound = rng.choice(line.parts.conditions)
    condition = line.word(span)
    if condition.startswith("not "):
        return line.replace(span, condition.removeprefix("not "))
    return line.replace(span, f"not ({condition})" if is_compound else f"not {condition}")


def _dropped_guard(line: _Line, rng: random.Random) -> str | None:
    conditions = line.parts.conditions
    return line.replace(rng.choice(conditions)[0], "False") if conditions else None


def _deleted_statement(line: _Line, rng: random.Random) -> str | None:
    return line.replace(line.parts.statement, "pass") if line.parts.statement else None


def _wrong_return(line: _Line, rng: random.Random) -> str | None:
    return line.replace(line.parts.returned, "None") if line.parts.returned else None


# Weights follow the shares of mutations that real tests notice.
_OPERATORS: tuple[tuple[str, float, Operator], ...] = (
    ("wrong_name", 2.6, _wrong_name),
    ("misspelt_name", 2.4, lambda line, rng: _misspelt(line, line.parts.names, rng)),
    ("dropped_argument", 2.0, _dropped_argument),
    ("swapped_word", 2.0, _swapped_word),
    ("deleted_statement", 1.6, _deleted_statement),
    ("swapped_arguments", 1.2, _swapped_arguments),
    ("unwrapped_call", 1.2, _unwrapped_call),
    ("wrong_return", 1.0, _wrong_return),
    ("sibling", 0.8, _sibling),
    ("negated_condition", 0.7, _negated_condition),
    ("wrong_integer", 0.6, _wrong_integer),
    ("dropped_guard", 0.5, _dropped_guard),
    ("misspelt_attribute", 0.4, lambda line, rng: _misspelt(line, line.parts.attributes, rng)),
    ("dropped_subscript", 0.4, _dropped_subscript),
)
_NAMES = [name for name, _, _ in _OPERATORS]
_WEIGHTS = [weight for _, weight, _ in _OPERATORS]
_BY_NAME = {name: operator for name, _, operator in _OPERATORS}
_ATTEMPTS = 16


def draw_mutation(
    lines: tuple[str, ...], rng: random.Random, numbers: Sequence[int] | None = None
) -> Mutation | None:
    """A random mutation of a function, on one of the lines `numbers` if given. None if no attempt succeeds."""
    parts = find_parts(lines)
    names = _names_of(lines)
    for _ in range(_ATTEMPTS):
        number = rng.choice(numbers) if numbers else rng.randrange(len(lines)) + 1
        gold = lines[number - 1]
        operator = rng.choices(_NAMES, _WEIGHTS)[0]
        broken = _BY_NAME[operator](_Line(gold, parts[number - 1], names), rng)
        if broken is None or broken.strip() == gold.strip():
            continue
        if _is_python(lines, number, broken):
            undefined = _undefined_name(gold, broken, names) if operator == "misspelt_name" else ""
            return Mutation(operator, number, gold, broken, undefined)
    return None


@lru_cache(maxsize=4096)
def _names_of(lines: tuple[str, ...]) -> tuple[str, ...]:
    spans = enumerate(find_parts(lines))
    words = {lines[index][start:end] for index, line in spans for start, end in line.names}
    header = lines[0].partition("(")[2].replace("*", " ").replace("=", " ").replace(")", " ")
    words |= {word for word in header.replace(",", " ").split() if word.isidentifier()}
    return tuple(
        sorted(word for word in words if not keyword.iskeyword(word) and word not in _BUILT_IN)
    )


_BUILT_IN = frozenset(dir(builtins))


def _undefined_name(gold: str, broken: str, names: tuple[str, ...]) -> str:
    """The misspelt word. Empty if the line assigns to it, because then another name becomes undefined."""
    known = set(gold.replace("=", " ").split()) | set(names)
    changed = find_words(broken) - find_words(gold)
    word = next(iter(changed), "") if len(changed) == 1 else ""
    head, separator, _ = broken.partition(" = ")
    is_target = separator and word in find_words(head)
    is_bound = (
        broken.lstrip().startswith(("for ", "with ", "import ", "from ")) or "lambda" in broken
    )
    return "" if word in known or word in _BUILT_IN or is_target or is_bound else word


def find_words(text: str) -> set[str]:
    separated = "".join(letter if letter.isalnum() or letter == "_" else " " for letter in text)
    return {word for word in separated.split() if word.isidentifier()}


def _is_python(lines: tuple[str, ...], number: int, broken: str) -> bool:
    changed = [*lines[: number - 1], broken, *lines[number:]]
    if changed[0][:1] == " ":
        changed.insert(0, "if True:")
    try:
        # ast.parse alone would accept repeated parameters and keywords
        compile("\n".join(changed), "<mutation>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True
