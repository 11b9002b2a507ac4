"""Calls as JSON objects: a name, and arguments under one of the keys that models use.

Input that would lose information is refused: a key given twice, numbers that JSON lacks, half a surrogate pair.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ARGUMENT_KEYS = ("arguments", "parameters", "args", "input")  # a call has one of these
_SPACE = re.compile(r"\s*")
_OTHER_KEYS = {"id", "type", "name"}


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A call as a model wrote it, not checked against the tools. `error`: why the call cannot be read."""

    name: str
    arguments: Mapping[str, Any]
    is_typed: bool = True  # False: arguments are texts, typed by the tool's definition
    call_id: str = ""
    error: str = ""


def read_json(text: str, position: int) -> tuple[Any, int]:
    """The value at a position, after white space, and its end. ValueError if there is none."""
    value, end = _DECODER.raw_decode(text, _SPACE.match(text, position).end())  # pyright: ignore
    json.dumps(value, ensure_ascii=False).encode()  # ValueError for half a surrogate pair
    return value, end


def whole_json(text: str) -> Any:
    """The value of a text. ValueError if other text follows it, or if there is none."""
    value, end = read_json(text, 0)
    if behind := text[end:].strip():
        raise ValueError(f"{behind[:40]!r} follows the arguments, wanted one JSON value")
    return value


def call_of_json(value: Any) -> WrittenCall:
    """The call in a JSON object. ValueError for any other value, and for keys that would be lost."""
    fields = value if isinstance(value, dict) else {}
    given = [fields[key] for key in ARGUMENT_KEYS if key in fields]
    others = fields.keys() - {*_OTHER_KEYS, *ARGUMENT_KEYS}
    name, arguments = fields.get("name"), None
    if not others and len(given) <= 1:
        arguments = given[0] if given else {}
    if isinstance(arguments, str):
        arguments = whole_json(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        wanted = f"name and one of {', '.join(ARGUMENT_KEYS)}, an object"
        raise ValueError(f"call is {json.dumps(value)[:80]}, wanted {wanted}")
    return WrittenCall(name, arguments)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} in a call, wanted JSON")


def _finite(number: str) -> float:
    value = float(number)
    if math.isinf(value):  # it cannot be written as JSON again
        _refuse(number)
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of its pairs. ValueError for a name given twice, because one value would be lost."""
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError(f"a name is given twice in {[name for name, _ in pairs]}, wanted it once")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_once, parse_constant=_refuse, parse_float=_finite)
