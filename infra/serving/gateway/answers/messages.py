"""Between OpenAI's messages and the harness's tokens.

The template is the renderer's: the served model sees exactly what it saw in training. A chat client
sends the whole history each time; when that history is one the gateway wrote, its exact tokens are
continued (token in, token out) instead of being encoded again. Histories are found by a hash of
owner and messages, so a stock OpenAI client needs no session id.
"""

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby

from pydantic import TypeAdapter, ValidationError

from ostinato.infra.agent.dialects.compact.calls import parse_answer
from ostinato.infra.agent.dialects.compact.tools import TOOLS
from ostinato.infra.agent.tools.calls import ParsedAnswer
from ostinato.infra.agent.transcript import CallStatus
from ostinato.infra.serving.gateway.failures import ApiError
from ostinato.infra.serving.gateway.schemas import ChatMessage, FunctionCall, ToolCall
from ostinato.models.rendering import Renderer

_ARGUMENTS = TypeAdapter(dict[str, str])


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat so far. `token_ids` stand for all messages up to and including the last answer."""

    session_id: str
    token_ids: tuple[int, ...]


def history_key(owner: tuple[str, str], messages: Sequence[ChatMessage]) -> str:
    """A hash of who said what. The same for the same history of the same owner."""
    said = [
        [
            "system" if message.role == "developer" else message.role,
            message.text,
            [
                [call.id, call.function.name, call.function.arguments]
                for call in message.tool_calls or []
            ],
            message.tool_call_id,
        ]
        for message in messages
    ]
    return hashlib.sha256(json.dumps([owner, said]).encode()).hexdigest()


def render_messages(
    renderer: Renderer, messages: Sequence[ChatMessage], earlier: Sequence[int] = ()
) -> list[int]:
    """Tokens of a history, answer header included. With `earlier`, `messages` are those that follow
    it.

    Messages of one side in a row are one message; tool results of one turn come together.
    """
    system, rest = _split_system(messages, is_start=not earlier)
    if not rest or rest[-1].role == "assistant":
        raise _wrong("the last message is no user's or tool's, wanted a user or tool message")
    tokens = list(earlier)
    for role, group in groupby(rest, key=lambda message: message.role):
        said = list(group)
        if role == "assistant":
            if not tokens:
                raise _wrong("the first message is the assistant's, wanted a user message")
            tokens += renderer.encode_answer("".join(_answer_text(message) for message in said))
        elif role == "tool":
            if not tokens:
                raise _wrong("the first message is a tool result, wanted a user message")
            tokens += renderer.append_results([message.text for message in said])
        else:
            text = "\n\n".join(message.text for message in said)
            tokens += renderer.append_user(text) if tokens else renderer.start(text, system)
    return tokens


def read_answer(
    text: str, tools: Collection[str], call_prefix: str
) -> tuple[ChatMessage, ParsedAnswer]:
    """Assistant message of a model's text. Calls that cannot run stay in the text."""
    parsed = parse_answer(text, tools) if tools else ParsedAnswer((), text)
    good = parsed.calls and all(call.status is CallStatus.OK for call in parsed.calls)
    if not good:
        return ChatMessage(role="assistant", content=text), parsed
    calls = [
        ToolCall(
            id=f"{call_prefix}{index}",
            function=FunctionCall(name=call.tool, arguments=json.dumps(call.arguments)),
        )
        for index, call in enumerate(parsed.calls)
    ]
    return ChatMessage(role="assistant", content=parsed.prose or None, tool_calls=calls), parsed


def write_call(call: ToolCall) -> str:
    """A client's call in the model's tags. A lone primary argument goes bare."""
    name = call.function.name
    tool = TOOLS.get(name)
    if tool is None:
        raise _wrong(f"tool call {call.id} names tool {name!r}, wanted one of {', '.join(TOOLS)}")
    try:
        arguments = _ARGUMENTS.validate_json(call.function.arguments or "{}")
    except ValidationError as error:
        raise _wrong(
            f"arguments of tool call {call.id} are {call.function.arguments!r}, wanted JSON, an "
            f"object of strings: {error.errors()[0]['msg']}"
        ) from error
    bare = arguments.pop(tool.primary, "")
    body = "".join(f"<{key}>{value}</{key}>" for key, value in arguments.items())
    if "<" in bare and tool.primary != "lines":
        body, bare = body + f"<{tool.primary}>{bare}</{tool.primary}>", ""
    return f"<{name}>{body}{bare}</{name}>"


def _split_system(
    messages: Sequence[ChatMessage], *, is_start: bool
) -> tuple[str | None, list[ChatMessage]]:
    systems = [message for message in messages if message.role in ("system", "developer")]
    rest = [message for message in messages if message.role not in ("system", "developer")]
    if systems and (not is_start or list(messages[: len(systems)]) != systems):
        raise _wrong("a system message follows other messages, wanted it first")
    return ("\n\n".join(message.text for message in systems) if systems else None), rest


def _answer_text(message: ChatMessage) -> str:
    return message.text + "".join(write_call(call) for call in message.tool_calls or [])


def _wrong(message: str) -> ApiError:
    return ApiError(400, message, param="messages")
