r"""The full dialect: calls in plain text, for templates without call tokens.

`write_call` writes and `parse_calls` reads this grammar:

    <call tool="edit_file">
    <path>pkg/core.py</path>
    <old>
    return 1
    </old>
    </call>

A value ends at the first closing tag of its own argument; inside a value that tag is written with a backslash
(`<\/old>`, and one more for each backslash there is). A line end after the opening tag and one before the closing tag
belong to the form. A call holds nothing else. The parser neither guesses nor raises: a call that breaks the grammar
becomes a result the model can read.
"""

import re
from collections.abc import Mapping

from ostinato.infra.agent.dialects.dialect import Dialect
from ostinato.infra.agent.dialects.published.json_calls import whole_json
from ostinato.infra.agent.dialects.spans import Closings, tagged_calls
from ostinato.infra.agent.tools.calls import ParsedAnswer, ParsedCall
from ostinato.infra.agent.tools.definition import Tool, check_arguments, strings_from_json
from ostinato.infra.agent.transcript import CallStatus

CALL_END = "</call>"
_CALL = re.compile(r"<call(?=[\s>])")
_OPENING = re.compile(r'<call tool="([A-Za-z_][\w-]*)">')
_NAME = r"[A-Za-z_][\w-]*"
_ARGUMENT = re.compile(f"<({_NAME})>")
_CLOSING = f"</(?P<tag>{_NAME})>"
_ESCAPED = r"<(\\*)/{}>"
FIND_CALLS = tagged_calls(
    r"<call(?=[\s>])[^<>]*>", rf"\s*<(?P<tag>{_NAME})>", _CLOSING, rf"\s*{CALL_END}"
)


def write_call(tool: str, arguments: Mapping[str, str]) -> str:
    """A call as a model writes it. `parse_calls` gives back the same arguments."""
    lines = [f'<call tool="{tool}">']
    for name, value in arguments.items():
        escaped = re.sub(_ESCAPED.format(name), rf"<\1\\/{name}>", value)
        # parse_calls strips one newline at both ends, so a value with newlines needs two more
        around = "\n" if "\n" in value else ""
        lines.append(f"<{name}>{around}{escaped}{around}</{name}>")
    return "\n".join([*lines, CALL_END])


def parse_calls(text: str, tools: Mapping[str, Tool]) -> ParsedAnswer:
    """Splits an answer into calls and prose. Calls to tools outside `tools` are unknown."""
    calls: list[ParsedCall] = []
    prose: list[str] = []
    position = 0
    closings = Closings(text, re.compile(_CLOSING))
    while found := _CALL.search(text, position):
        prose.append(text[position : found.start()])
        call, position = _parse_call(text, found.start(), tools, closings)
        calls.append(call)
    prose.append(text[position:])
    outside = "".join(prose).strip()
    if not calls and CALL_END in outside:
        calls.append(_malformed("", f'{CALL_END} without <call tool="NAME"> before it'))
    return ParsedAnswer(tuple(calls), outside)


def call_from_json(
    name: str, arguments_json: str, tools: Mapping[str, Tool], call_id: str = ""
) -> ParsedCall:
    """A call that came as an API's function call, checked as strictly as a written one."""
    if name not in tools:
        return _unknown(name, {"arguments": arguments_json}, tools, call_id)
    tool = tools[name]
    try:
        given = whole_json(arguments_json or "{}")
    except (ValueError, RecursionError) as error:
        return _malformed(name, f"arguments are not JSON: {error}", call_id)
    if not isinstance(given, dict):
        return _malformed(name, f"arguments are {arguments_json[:60]}, wanted an object", call_id)
    strings, error = strings_from_json(tool, given)
    if error:
        return ParsedCall(name, {}, CallStatus.INVALID_ARGUMENTS, error, call_id=call_id)
    return call_from_texts(name, strings, tools, call_id)


def call_from_texts(
    name: str, arguments: dict[str, str], tools: Mapping[str, Tool], call_id: str = ""
) -> ParsedCall:
    """A call whose arguments are all texts, checked against the tool's definition."""
    if name not in tools:
        return _unknown(name, arguments, tools, call_id)
    tool = tools[name]
    checked = check_arguments(tool, arguments)
    status = CallStatus.INVALID_ARGUMENTS if checked.error else CallStatus.OK
    return ParsedCall(tool.name, arguments, status, checked.error, checked.values, call_id)


class _Broken(Exception):
    """Malformed call, with place and reason."""

    def __init__(self, position: int, reason: str) -> None:
        super().__init__(reason)
        self.position, self.reason = position, reason


def _parse_call(
    text: str, start: int, tools: Mapping[str, Tool], closings: Closings
) -> tuple[ParsedCall, int]:
    """The call at `start` and the position after it."""
    opening = _OPENING.match(text, start)
    if opening is None:
        tag = text[start : start + 40].split("\n", 1)[0]
        return _resume(text, start, "", f'{tag!r} opens no call, wanted <call tool="NAME">')
    name = opening.group(1)
    try:
        arguments, end = _parse_arguments(text, opening.end(), closings)
    except _Broken as broken:
        return _resume(text, broken.position, name, broken.reason)
    return call_from_texts(name, arguments, tools), end


def _parse_arguments(text: str, position: int, closings: Closings) -> tuple[dict[str, str], int]:
    arguments: dict[str, str] = {}
    while True:
        position = _skip_space(text, position)
        if text.startswith(CALL_END, position):
            return arguments, position + len(CALL_END)
        opening = _ARGUMENT.match(text, position)
        if opening is None:
            seen = text[position : position + 40].split("\n", 1)[0]
            reason = f"{seen!r} in a call, wanted an <argument> or {CALL_END}"
            raise _Broken(position, reason if seen else f"{CALL_END} is missing")
        name = opening.group(1)
        closing = closings.after(name, opening.end())
        if closing is None:
            raise _Broken(opening.end(), f"</{name}> is missing")
        if name in arguments:
            raise _Broken(closing[0], f"{name} is given twice")
        arguments[name] = _read_value(name, text[opening.end() : closing[0]])
        position = closing[1]


def _read_value(name: str, raw: str) -> str:
    if len(raw) >= 2 and raw[0] == raw[-1] == "\n":
        raw = raw[1:-1]
    return re.sub(rf"<\\(\\*)/{name}>", rf"<\1/{name}>", raw)


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _resume(text: str, position: int, name: str, reason: str) -> tuple[ParsedCall, int]:
    """A malformed call, and the position after the next </call>, or the end of the text without one.
    Text after the error may be the rest of a value and must not run.
    """
    end = text.find(CALL_END, position)
    return _malformed(name, reason), len(text) if end < 0 else end + len(CALL_END)


def _malformed(name: str, reason: str, call_id: str = "") -> ParsedCall:
    return ParsedCall(name, {}, CallStatus.MALFORMED, reason, call_id=call_id)


def _unknown(
    name: str, arguments: dict[str, str], tools: Mapping[str, Tool], call_id: str = ""
) -> ParsedCall:
    error = f"no tool {name[:60]}, wanted one of {', '.join(tools)}"
    return ParsedCall(name, arguments, CallStatus.UNKNOWN_TOOL, error, call_id=call_id)


_EXAMPLE = {"path": "src/app.py", "old": "return a\nreturn b", "new": "return b"}

DIALECT = Dialect(
    parse=parse_calls,
    write=write_call,
    find_calls=FIND_CALLS,
    guide=(
        f"A call is written like this:\n{write_call('edit_file', _EXAMPLE)}\n"
        "A value ends at the first closing tag of its own name; write that tag inside a value as "
        "<\\/name>. Nothing else stands between <call> and </call>."
    ),
)
