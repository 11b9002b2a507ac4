"""OpenAI's messages as the harness's tokens: results of calls in order, histories, rendering.

The template is the renderer's: the served model sees exactly what it saw in training. A chat client
sends the whole history each time; when that history is one the gateway wrote, its exact tokens are
continued (token in, token out) instead of being encoded again. Histories are found by a hash of
owner and messages, so a stock OpenAI client needs no session id.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from ostinato.infra.serving.gateway.answers.tool_forms import ToolForm
from ostinato.infra.serving.gateway.failures import ApiError
from ostinato.infra.serving.gateway.schemas import ChatMessage, ToolDefinition
from ostinato.models.rendering import Renderer

_SYSTEM_ROLES = ("system", "developer")


def arrange(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The messages as a template can show them. Behind each answer come the results of its calls, in call
    order, then the other messages. A system message behind other messages is the user's: templates have
    one place for the system's, the start. ApiError for a call without one result, and a result without
    a call. An answer with its calls in its text is followed by results without ids, in their order.
    """
    arranged: list[ChatMessage] = []
    call_ids: list[str] | None = None  # of the last answer
    for is_answer, group in groupby(messages, key=lambda message: message.role == "assistant"):
        said = list(group)
        if is_answer:
            call_ids = [call.id for message in said for call in message.tool_calls or ()]
            arranged += said
            continue
        arranged += _match(call_ids, [message for message in said if message.role == "tool"])
        for message in said:
            if message.role in _SYSTEM_ROLES and not _is_start(arranged):
                arranged.append(message.model_copy(update={"role": "user"}))
            elif message.role != "tool":
                arranged.append(message)
    return arranged


def _is_start(arranged: Sequence[ChatMessage]) -> bool:
    return not arranged or arranged[-1].role in _SYSTEM_ROLES


def _match(call_ids: list[str] | None, results: list[ChatMessage]) -> list[ChatMessage]:
    """The results in call order. None: no answer comes before them."""
    if call_ids == [] and all(result.tool_call_id is None for result in results):
        return results
    calls = call_ids or []
    wanted = f"one of {', '.join(map(repr, calls))}" if calls else "none, since no call is open"
    by_id: dict[str, ChatMessage] = {}
    for result in results:
        call_id = result.tool_call_id
        if call_id is None or call_id not in calls:
            raise _wrong(f"a tool result has the call id {call_id!r}, wanted {wanted}")
        if call_id in by_id:
            raise _wrong(f"two tool results have the call id {call_id!r}, wanted one of each call")
        by_id[call_id] = result
    for place, call_id in enumerate(calls):
        if call_id in calls[:place]:
            raise _wrong(f"two calls of one answer have the id {call_id!r}, wanted ids that differ")
        if call_id not in by_id:
            raise _wrong(
                f"call {call_id!r} has no result, wanted a tool result of each call of an answer "
                "before the next answer"
            )
    return [by_id[call_id] for call_id in calls]


@dataclass(frozen=True, slots=True)
class ChatHistory:
    """A chat so far. `token_ids` are those of all messages up to and including the last answer."""

    session_id: str
    token_ids: tuple[int, ...]


def history_key(owner: tuple[str, str], messages: Sequence[ChatMessage], tools: str = "") -> str:
    """A hash of roles and texts: the same for the same history of an owner under the same tools."""
    said = [
        [
            "system" if message.role == "developer" else message.role,
            message.text,
            [
                [call.id, call.function.name, _canonical(call.function.arguments)]
                for call in message.tool_calls or []
            ],
            message.tool_call_id,
        ]
        for message in messages
    ]
    return hashlib.sha256(json.dumps([owner, said, tools]).encode()).hexdigest()


def _canonical(arguments: str) -> str:
    """The same JSON in one spelling: clients may parse and write again the JSON that they were given."""
    try:
        return json.dumps(json.loads(arguments))
    except (ValueError, RecursionError):
        return arguments


def render_messages(
    renderer: Renderer,
    messages: Sequence[ChatMessage],
    form: ToolForm,
    tools: Sequence[ToolDefinition] = (),
    earlier: Sequence[int] = (),
) -> list[int]:
    """Tokens of a history as `arrange` gives it, answer header included. `earlier`: tokens of the messages
    before `messages`. Messages of one side in a row are one message; tool results of one turn come together.
    """
    system, rest = _split_system(messages)
    if not rest or rest[-1].role == "assistant":
        raise _wrong("the last message is no user's or tool's, wanted a user or tool message")
    tokens = list(earlier)
    has_header = False  # the tokens end with the opening of the next answer
    for role, group in groupby(rest, key=lambda message: message.role):
        said = list(group)
        if has_header and role != "assistant":
            del tokens[len(tokens) - renderer.header_size(tokens) :]
        has_header = role != "assistant"
        if role == "assistant":
            if not tokens:
                raise _wrong("the first message is the assistant's, wanted a user message")
            text = "".join(_answer_text(message, form) for message in said)
            tokens += renderer.encode_answer(text)
        elif role == "tool":
            if not tokens:
                raise _wrong("the first message is a tool result, wanted a user message")
            tokens += renderer.append_results([message.text for message in said])
        else:
            text = "\n\n".join(message.text for message in said)
            tokens += renderer.append_user(text) if tokens else form.start(text, system, tools)
    return tokens


def _split_system(messages: Sequence[ChatMessage]) -> tuple[str | None, list[ChatMessage]]:
    systems = [message for message in messages if message.role in ("system", "developer")]
    rest = [message for message in messages if message.role not in ("system", "developer")]
    return ("\n\n".join(message.text for message in systems) if systems else None), rest


def _answer_text(message: ChatMessage, form: ToolForm) -> str:
    calls = "".join(form.write_call(call) for call in message.tool_calls or [])
    return message.text + calls if message.text else calls.lstrip("\n")


def _wrong(message: str) -> ApiError:
    return ApiError(400, message, param="messages")
