"""A dialect: calls as JSON objects, each alone on a line."""

import json
from collections.abc import Mapping

from ostinato.infra.agent.dialects.dialect import Dialect
from ostinato.infra.agent.dialects.full.calls import call_from_json
from ostinato.infra.agent.tools.calls import ParsedAnswer, ParsedCall
from ostinato.infra.agent.tools.definition import Tool
from ostinato.infra.agent.transcript import CallStatus


def parse(text: str, tools: Mapping[str, Tool]) -> ParsedAnswer:
    """The calls, one per line that begins with a brace, and the other lines as prose."""
    lines = text.split("\n")
    calls = tuple(_parse_call(line, tools) for line in lines if line.startswith("{"))
    prose = "\n".join(line for line in lines if not line.startswith("{"))
    return ParsedAnswer(calls, prose.strip())


def _parse_call(line: str, tools: Mapping[str, Tool]) -> ParsedCall:
    try:
        call = json.loads(line)
        return call_from_json(call["tool"], json.dumps(call.get("arguments", {})), tools)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return ParsedCall("", status=CallStatus.MALFORMED, error=f"no call in JSON: {error}")


DIALECT = Dialect(
    parse=parse,
    guide=(
        'A call is one line: {"tool": "read_file", "arguments": {"path": "src/app.py"}}\n'
        "A line that begins with { is always a call."
    ),
)
