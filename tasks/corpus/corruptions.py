"""Breaks one line of a function in a way that people break lines.

A function and a random generator in, a `Corruption` out: the line, its new text and which operator made it. Corruptions are
made on the text of the line and checked to be valid Python; whether a test would notice is not known here.
"""

import builtins
import keyword
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tasks.corpus.functions import CodeFunction


@dataclass(frozen=True, slots=True)
class Corruption:
    """Line `number` (1-based in the function) reads `broken` instead of `gold`."""

    number: int
    gold: str
    broken: str
    operator: str
    undefined_name: str = ""  # a name that no longer means anything, when that is known


@dataclass(frozen=True, slots=True)
class _Line:
    text: str
    names: tuple[str, ...]  # other names of the function


_NAME = re.compile(r"(?<![\w.'\"])[A-Za-z_]\w*(?![\w'\"])")
_ATTRIBUTE = re.compile(r"(?<=[\w)\]]\.)[A-Za-z_]\w*")
_INTEGER = re.compile(r"(?<![\w.])\d+(?![\w.])")
_CALL = re.compile(r"(?<![\w.])([A-Za-z_][\w.]*)\(([^()]*)\)")
_SUBSCRIPT = re.compile(r"(?<=[\w)])\[[^\[\]]+\]")
_CONDITION = re.compile(r"\b(if|while|elif)\s+(not\s+)?([^:]+?)(?=:|$|\])")
_SIMPLE = re.compile(
    r"^(\s*)(?!def |class |if |for |while |with |try|else|elif|except|finally|@|pass)"
)
_SWAPS = (
    ("==", "!="),
    (" <= ", " < "),
    (" >= ", " > "),
    (" < ", " > "),
    (" + ", " - "),
    (" - ", " + "),
    (" * ", " + "),
    (" and ", " or "),
    (" is not ", " is "),
    (" is ", " is not "),
    (" not in ", " in "),
    ("True", "False"),
    ("False", "True"),
    ("None", "True"),
    ("yield from ", "yield "),
    ("continue", "break"),
    ("break", "continue"),
    ("return ", ""),
    (" // ", " / "),
    (" += ", " = "),
    ("any(", "all("),
    ("all(", "any("),
    ("min(", "max("),
    ("max(", "min("),
)
Operator = Callable[[_Line, random.Random], tuple[str, str] | None]


def _replace(text: str, match: re.Match[str], new: str) -> str:
    return text[: match.start()] + new + text[match.end() :]


def _pick(pattern: re.Pattern[str], text: str, rng: random.Random) -> re.Match[str] | None:
    matches = [match for match in pattern.finditer(text) if not keyword.iskeyword(match.group())]
    return rng.choice(matches) if matches else None


def _wrong_name(line: _Line, rng: random.Random) -> tuple[str, str] | None:
    match = _pick(_NAME, line.text, rng)
    others = [name for name in line.names if match and name != match.group()]
    return (_replace(line.text, match, rng.choice(others)), "") if match and others else None


def _misspell(word: str, rng: random.Random) -> str:
    index = rng.randrange(len(word))
    match rng.randrange(4):
        case 0 if len(word) > 2:
            return word[:index] + word[index + 1 :]
        case 1 if len(word) > 2 and index + 1 < len(word):
            return word[:index] + word[index + 1] + word[index] + word[index + 2 :]
        case 2:
            return word + "_"
    return word[: index + 1] + word[index] + word[index + 1 :]


def _misspelt_name(line: _Line, rng: random.Random) -> tuple[str, str] | None:
    match = _pick(_NAME, line.text, rng)
    if match is None:
        return None
    typo = _misspell(match.group(), rng)
    return _replace(line.text, match, typo), typo


def _wrong_attribute(line: _Line, rng: random.Random) -> tuple[str, str] | None:
    match = _pick(_ATTRIBUTE, line.text, rng)
    return (_replace(line.text, match, _misspell(match.group(), rng)), "") if match else None


def _wrong_integer(line: _Line, rng: random.Random) -> tuple[str, str] | None:
    match = _pick(_INTEGER, line.text, rng)
    if match is None:
        return None
    return _replace(line.text, match, str(max(int(match.group()) + rng.choice((-1, 1)), 0))), ""


def _swapped_word(line: _Line, rng: random.Random) -> tuple[str, str] | None:
    choices = [(old, new) for old, new in _SWAPS if old in line.text]
    if not choices:
        return None
    old, new = rng.choice(choices)
    return line.text.replace(old, new, 1), ""


def _unwrapped_call(line: _Line, rng: random.Random) -> tuple[str, str] | None:
    match = _pick(_CALL, line.text, rng)
    if match is None or not match.group(2).strip() or "def " in line.text:
        return None
    return _replace(line.text, match, match.group(2)), ""


def _changed_arguments(line: _Line, rng: random.Random) -> tuple[str, str] | None:
    matches = [match for match in _CALL.finditer(line.text) if ", " in match.group(2)]
    if not matches:
        return None
    match = rng.choice(matches)
    arguments = match.group(2).split(", ")
    index = rng.randrange(len(arguments) - 1)
    if rng.random() < 0.5:
        arguments[index], arguments[index + 1] = arguments[index + 1], arguments[index]
    else:
        del arguments[rng.randrange(len(arguments))]
    return _replace(line.text, match, f"{match.group(1)}({', '.join(arguments)})"), ""


def _dropped_subscript(line: _Line, rng: random.Random) -> tuple[str, str] | None:
    match = _pick(_SUBSCRIPT, line.text, rng)
    return (_replace(line.text, match, ""), "") if match else None


def _negated_condition(line: _Line, rng: random.Random) -> tuple[str, str] | None:
    match = _pick_condition(line.text, rng)
    if match is None:
        return None
    word, negation, condition = match.groups()
    return _replace(line.text, match, f"{word} {condition if negation else 'not ' + condition}"), ""


def _pick_condition(text: str, rng: random.Random) -> re.Match[str] | None:
    matches = list(_CONDITION.finditer(text))
    return rng.choice(matches) if matches else None


def _deleted_statement(line: _Line, rng: random.Random) -> tuple[str, str] | None:
    match = _SIMPLE.match(line.text)
    return (f"{match.group(1)}pass", "") if match else None


# Shares follow the mutants that real tests notice: wrong variables first.
_OPERATORS: tuple[tuple[str, float, Operator], ...] = (
    ("wrong_name", 4.0, _wrong_name),
    ("misspelt_name", 2.0, _misspelt_name),
    ("swapped_word", 1.5, _swapped_word),
    ("changed_arguments", 1.5, _changed_arguments),
    ("unwrapped_call", 1.0, _unwrapped_call),
    ("wrong_attribute", 0.7, _wrong_attribute),
    ("deleted_statement", 0.7, _deleted_statement),
    ("wrong_integer", 0.7, _wrong_integer),
    ("dropped_subscript", 0.5, _dropped_subscript),
    ("negated_condition", 0.5, _negated_condition),
)
_NAMES = [name for name, _, _ in _OPERATORS]
_WEIGHTS = [weight for _, weight, _ in _OPERATORS]
_BY_NAME = {name: operator for name, _, operator in _OPERATORS}
_ATTEMPTS = 12
_FIT_FOR_HEADER = (
    "wrong_integer",
    "swapped_word",
)  # defaults may be wrong; names are the interface


def corrupt_function(
    function: CodeFunction, rng: random.Random, numbers: Sequence[int] | None = None
) -> Corruption | None:
    """A random corruption, on one of the lines `numbers` when given; None when none was found."""
    names = _names_of(function)
    for _ in range(_ATTEMPTS):
        number = rng.choice(numbers) if numbers else rng.randrange(len(function.lines)) + 1
        gold = function.lines[number - 1]
        operator = rng.choices(_NAMES, _WEIGHTS)[0]
        if number == 1 and operator not in _FIT_FOR_HEADER:
            continue
        made = _BY_NAME[operator](_Line(gold, names), rng)
        if made is None or made[0].strip() == gold.strip():
            continue
        broken, undefined = made
        if not _is_python(function, number, broken):
            continue
        if undefined in names or undefined in function.lines[0]:
            undefined = ""
        return Corruption(number, gold, broken, operator, undefined)
    return None


def _names_of(function: CodeFunction) -> tuple[str, ...]:
    words = {word for line in function.lines for word in _NAME.findall(line)}
    return tuple(
        sorted(
            word for word in words if not keyword.iskeyword(word) and not hasattr(builtins, word)
        )
    )


def _is_python(function: CodeFunction, number: int, broken: str) -> bool:
    lines = [*function.lines[: number - 1], broken, *function.lines[number:]]
    if lines[0][:1] == " ":  # a method, indented as in its class
        lines.insert(0, "if True:")
    try:
        # ast.parse alone would let repeated parameters and keywords pass
        compile("\n".join(lines), "<corruption>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True
