"""Tools of MCP servers that run in an attempt's box: started with the attempt, called through the box.

`inside/mcp_bridge.py` speaks the protocol in the box; each call is one command there. Output of a server is untrusted
and reaches nothing but the model. If a server does not start, the model gets one tool that reports the reason, and the
attempt goes on.
"""

import asyncio
import inspect
import json
import re
import shlex
from collections.abc import Mapping
from functools import partial
from typing import Any

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.environment import AgentEnvironment, ToolFailure, ToolTimeout
from ostinato.infra.agent.tools.definition import Tool, Values, declared_tool
from ostinato.infra.platform.errors import SandboxError, is_retryable
from ostinato.infra.sandbox.inside import mcp_bridge

FOLDER = "/tmp/.mcp"
BRIDGE = f"{FOLDER}/bridge.py"
MARGIN_SECONDS = 2.0  # between the limits of the bridge and of the server
ANSWER_BYTES = 1 << 20  # a longer answer is refused
MAX_TOOLS = 64  # of one server
_MAX_CHARACTERS = 4_000  # of a tool's description, and of the JSON of its schema
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")


async def start_servers(environment: AgentEnvironment, config: HarnessConfig) -> None:
    """Starts the servers of the settings in the box and adds their tools to the environment, once."""
    if not config.mcp_servers or environment.tools:
        return
    await environment.sandbox.write(BRIDGE, inspect.getsource(mcp_bridge).encode())
    found = await asyncio.gather(
        *(_start(environment, name, text, config) for name, text in config.mcp_servers.items())
    )
    environment.tools = {tool.name: tool for tools in found for tool in tools}


async def _start(
    environment: AgentEnvironment, server: str, command: str, config: HarnessConfig
) -> list[Tool]:
    """The tools of a server. If it does not start or has none, one tool that reports the reason."""
    request = {"command": command, "seconds": config.call_time_limit_seconds}
    try:
        listed = await _ask(environment, "start", server, request, config)
        tools = [_tool_of(server, each) for each in (listed.get("tools") or [])[:MAX_TOOLS]]
        usable = [tool for tool in tools if tool is not None]
        if usable:
            return usable
        reason = f"MCP server {server}: it has {len(tools)} tools, wanted one with a name like {_NAME.pattern}"
    except (ToolFailure, ToolTimeout) as error:
        reason = str(error)
    reason = f"it did not start: {reason}"

    async def refuse(environment: AgentEnvironment, values: Values, config: HarnessConfig) -> str:
        raise ToolFailure(reason)

    description = f"Cannot be called: {reason}"[:_MAX_CHARACTERS]
    return [declared_tool(server, description, {}, refuse, f"mcp/{server}")]


def _tool_of(server: str, listed: Any) -> Tool | None:
    """A tool as a server lists it. None if its name or schema is unfit for the model."""
    if not isinstance(listed, Mapping):
        return None
    name, schema = str(listed.get("name", "")), listed.get("inputSchema") or {}
    if not _is_fit(schema) or _NAME.fullmatch(f"{server}__{name}") is None:
        return None
    return declared_tool(
        f"{server}__{name}",
        str(listed.get("description") or "")[:_MAX_CHARACTERS],
        schema,
        partial(_call, server, name),
        f"mcp/{server}",
    )


def _is_fit(schema: Any) -> bool:
    """Whether a schema is one of arguments with names that the model can write."""
    if not isinstance(schema, Mapping) or len(json.dumps(schema)) > _MAX_CHARACTERS:
        return False
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    return (
        isinstance(properties, Mapping)
        and isinstance(required, list)
        and all(_NAME.fullmatch(key) for key in properties)
    )


async def _call(
    server: str, tool: str, environment: AgentEnvironment, values: Values, config: HarnessConfig
) -> str:
    """The text of a call's result. ToolFailure with the server's message when the call failed."""
    call = {"name": tool, "arguments": dict(values)}
    request = {"call": call, "seconds": config.call_time_limit_seconds - MARGIN_SECONDS / 2}
    result = await _ask(environment, "call", server, request, config)
    parts = result.get("content") or []
    listed = parts if isinstance(parts, list) else [{"type": "text", "text": str(parts)}]
    text = "\n".join(_text_of(part) for part in listed if isinstance(part, Mapping))
    if not parts and "structuredContent" in result:  # which servers should repeat as text
        text = json.dumps(result["structuredContent"], ensure_ascii=False)
    if result.get("isError"):
        raise ToolFailure(text or f"{tool} failed and said nothing")
    return text


def _text_of(part: Mapping[str, Any]) -> str:
    if part.get("type") == "text":
        return str(part.get("text", ""))
    resource = part.get("resource")
    if isinstance(resource, Mapping) and "text" in resource:
        return str(resource["text"])
    return f"[{part.get('type', 'part')}, {len(json.dumps(part))} characters, not shown]"


async def _ask(
    environment: AgentEnvironment,
    act: str,
    server: str,
    request: Mapping[str, Any],
    config: HarnessConfig,
) -> dict[str, Any]:
    """The bridge's answer to a request. ToolFailure for faults of the server, ToolTimeout if it does not answer."""
    folder = f"{FOLDER}/{server}"
    command = f"mkdir -p {folder} && exec python3 -ISB {BRIDGE} {act} {shlex.quote(folder)}"
    limit = config.call_time_limit_seconds + (MARGIN_SECONDS if act == "start" else 0)
    try:
        done = await environment.sandbox.exec(
            command, limit, ANSWER_BYTES, stdin=json.dumps(request).encode()
        )
    except SandboxError as error:
        if is_retryable(error):
            raise
        raise ToolFailure(f"MCP server {server}: {error}") from error
    if done.timed_out:
        raise ToolTimeout(f"MCP server {server} did not answer within {limit:g} seconds")
    if done.truncated:
        raise ToolFailure(f"MCP server {server}: the answer has more than {ANSWER_BYTES} bytes")
    try:
        answer = _without_half_characters(json.loads(done.output))
    except (ValueError, RecursionError):
        answer = None
    # the bridge is a file in the box, which the agent can change
    if isinstance(answer, dict) and "error" in answer:
        raise ToolFailure(f"MCP server {server}: {answer['error']}")
    if not isinstance(answer, dict) or not isinstance(answer.get("result"), dict):
        said = done.output.decode(errors="replace")[-300:].strip()
        raise ToolFailure(f"MCP server {server}: {said or 'the bridge said nothing'}")
    return answer["result"]


def _without_half_characters(value: Any) -> Any:
    """A JSON value in which "?" replaces each half of a surrogate pair without its other half, which no text can
    hold and no tokenizer can encode.
    """
    return json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
