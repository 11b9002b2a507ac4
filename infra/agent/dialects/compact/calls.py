"""Parser of the compact dialect, whose tool names and line tags are single tokens.

The grammar is `<tool>ARGUMENTS</tool>`, where arguments are `<name>value</name>` and the rest is the tool's primary
argument. The parser neither guesses nor raises: a call that breaks the grammar becomes a result the model can read.
"""

import re
from collections.abc import Collection

from ostinato.infra.agent.dialects.compact.tools import COMPACT_TOOLS
from ostinato.infra.agent.dialects.dialect import Dialect
from ostinato.infra.agent.dialects.spans import Closings, wrapped_calls
from ostinato.infra.agent.tools.calls import ParsedAnswer, ParsedCall
from ostinato.infra.agent.tools.definition import Tool
from ostinato.infra.agent.transcript import CallStatus

FIND_CALLS = wrapped_calls("|".join(COMPACT_TOOLS))
_OPENING = re.compile(r"<([a-z][a-z0-9_]*)>")
_CLOSING = re.compile(r"</(?P<tag>[a-z][a-z0-9_]*)>")


def parse_answer(text: str, enabled_tools: Collection[str]) -> ParsedAnswer:
    """Splits an answer into calls and prose. Calls to tools outside `enabled_tools` are unknown."""
    calls: list[ParsedCall] = []
    prose: list[str] = []
    position = 0
    closings = Closings(text, _CLOSING)
    while opening := _OPENING.search(text, position):
        name = opening.group(1)
        closing = closings.after(name, opening.end())
        if closing is None:
            if name not in COMPACT_TOOLS:  # a lone <word> is prose
                prose.append(text[position : opening.end()])
                position = opening.end()
                continue
            prose.append(text[position : opening.start()])
            calls.append(
                ParsedCall(name, status=CallStatus.MALFORMED, error=f"</{name}> is missing")
            )
            position = len(text)
            break
        prose.append(text[position : opening.start()])
        calls.append(_parse_call(name, text[opening.end() : closing[0]], enabled_tools))
        position = closing[1]
    prose.append(text[position:])
    outside = "".join(prose).strip()
    if not calls:
        stray = next((tool for tool in COMPACT_TOOLS if f"</{tool}>" in outside), None)
        if stray is not None:
            error = f"<{stray}> is missing"
            calls.append(ParsedCall(stray, status=CallStatus.MALFORMED, error=error))
    return ParsedAnswer(tuple(calls), outside)


def _parse_call(name: str, body: str, enabled_tools: Collection[str]) -> ParsedCall:
    if name not in enabled_tools:
        error = f"no tool {name}, wanted one of {' '.join(enabled_tools)}"
        return ParsedCall(name, {"body": body}, CallStatus.UNKNOWN_TOOL, error)
    tool = COMPACT_TOOLS[name]
    arguments: dict[str, str] = {}
    rest = body
    while opening := _OPENING.match(rest.lstrip()):
        argument = tool.argument(opening.group(1))
        if argument is None:
            break
        rest = rest.lstrip()
        closing = f"</{argument.name}>"
        end = rest.find(closing, opening.end())
        if end < 0:
            return ParsedCall(name, arguments, CallStatus.MALFORMED, f"{closing} is missing")
        if argument.name in arguments:
            error = f"{argument.name} is given twice"
            return ParsedCall(name, arguments, CallStatus.INVALID_ARGUMENTS, error)
        value = rest[opening.end() : end]
        arguments[argument.name] = value if argument.is_text else value.strip()
        rest = rest[end + len(closing) :]
    error = _take_rest(tool, arguments, rest) or _check(tool, arguments)
    if error:
        return ParsedCall(name, arguments, CallStatus.INVALID_ARGUMENTS, error)
    return ParsedCall(name, arguments, values={**arguments})


def _take_rest(tool: Tool, arguments: dict[str, str], rest: str) -> str:
    """Stores the text after the tagged arguments as the primary argument. Returns the error, or an empty text."""
    if not rest.strip():
        return ""
    if tool.primary in arguments:
        return f"text after {tool.primary}"
    primary = tool.argument(tool.primary)
    assert primary is not None
    arguments[tool.primary] = rest if primary.is_text else rest.strip()
    return ""


def _check(tool: Tool, arguments: dict[str, str]) -> str:
    for argument in tool.arguments:
        if argument.is_required and not arguments.get(argument.name, "").strip():
            return f"{argument.name} is missing"
    return tool.rule(arguments) if tool.rule is not None else ""


DIALECT = Dialect(parse=parse_answer, find_calls=FIND_CALLS, tools=COMPACT_TOOLS)
