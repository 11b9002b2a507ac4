"""OpenAI's messages as the harness's tokens: order of call results, histories, rendering.

The renderer's template is used, so the served model sees exactly what it saw in training. A chat
client sends the whole history each time. When the gateway wrote that history, its exact tokens are
continued (token in, token out) instead of being encoded again. Histories are found by a hash of
owner and messages, so a stock OpenAI client needs no session id.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from ostinato.infra.agent.sessions import SampledTurn
from ostinato.infra.serving.gateway.answers.tool_forms import ToolForm, refusal
from ostinato.infra.serving.gateway.schemas import ChatMessage, ToolDefinition
from ostinato.models.rendering import Renderer
from ostinato.models.rendering.call_results import NamedCall

_SYSTEM_ROLES = ("system", "developer")


def arrange(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The messages in an order that templates can render. After each answer come the results of its calls, in
    call order, then the other messages. A system message after other messages becomes the user's, since
    templates place the system message at the start only. ApiError for a call without exactly one result, and
    for a result without a call. Results of calls in an answer's text have no ids and keep their order.
    """
    arranged: list[ChatMessage] = []
    call_ids: list[str] | None = None  # of the last answer
    for is_answer, group in groupby(messages, key=lambda message: message.role == "assistant"):
        run = list(group)
        if is_answer:
            call_ids = [call.id for message in run for call in message.tool_calls or ()]
            arranged += run
            continue
        arranged += _match(call_ids, [message for message in run if message.role == "tool"])
        for message in run:
            is_start = not arranged or arranged[-1].role in _SYSTEM_ROLES
            if message.role in _SYSTEM_ROLES and not is_start:
                arranged.append(message.model_copy(update={"role": "user"}))
            elif message.role != "tool":
                arranged.append(message)
    return arranged


def _match(call_ids: list[str] | None, results: list[ChatMessage]) -> list[ChatMessage]:
    """The results in call order. `call_ids`: of the answer before them (None: there is none)."""
    if call_ids == [] and all(result.tool_call_id is None for result in results):
        return results
    calls = call_ids or []
    wanted = f"one of {', '.join(map(repr, calls))}" if calls else "none, since no call is open"
    by_id: dict[str, ChatMessage] = {}
    for result in results:
        call_id = result.tool_call_id
        if call_id is None or call_id not in calls:
            raise refusal(f"a tool result has the call id {call_id!r}, wanted {wanted}")
        if call_id in by_id:
            raise refusal(f"two tool results have the call id {call_id!r}, wanted one per call")
        by_id[call_id] = result
    for place, call_id in enumerate(calls):
        if call_id in calls[:place]:
            raise refusal(f"two calls of one answer have the id {call_id!r}, wanted unique ids")
        if call_id not in by_id:
            raise refusal(
                f"call {call_id!r} has no result, wanted a tool result for each call of an answer "
                "before the next answer"
            )
    return [by_id[call_id] for call_id in calls]


@dataclass(frozen=True, slots=True)
class ChatHistory:
    """A chat so far. `token_ids` cover all messages up to and including the last answer."""

    session_id: str
    token_ids: tuple[int, ...]
    turn: SampledTurn | None = None  # the last answer, where a session is kept as a graph
    num_messages: int = 0  # up to and including `turn`, where there is one


def name_session(owner: tuple[str, str]) -> str:
    """Id of the session that a client named, without its name."""
    return f"chat-{hashlib.sha256(json.dumps(owner).encode()).hexdigest()[:32]}"


def history_keys(
    owner: tuple[str, str], messages: Sequence[ChatMessage], tools: str = ""
) -> list[str]:
    """One key per message: a hash of the owner, the tools and all messages up to it."""
    key = hashlib.sha256(json.dumps([owner, tools]).encode()).hexdigest()
    keys = []
    for message in messages:
        content = [
            "system" if message.role == "developer" else message.role,
            message.text,
            [
                [call.id, call.function.name, _canonical(call.function.arguments)]
                for call in message.tool_calls or []
            ],
            message.tool_call_id,
        ]
        key = hashlib.sha256(json.dumps([key, content]).encode()).hexdigest()
        keys.append(key)
    return keys


def _canonical(arguments: str) -> str:
    """The JSON in one spelling, since clients may parse and rewrite the JSON that they received."""
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
    """Tokens of a history in `arrange`'s order, with the header of the next answer. `earlier`: tokens of the
    messages before `messages`. Consecutive messages of one role are rendered as one turn.
    """
    system, rest = _split_system(messages)
    if not rest or rest[-1].role == "assistant":
        raise refusal("the last message is not a user's or a tool's, wanted a user or tool message")
    tokens = list(earlier)
    has_header = False  # the tokens end with the opening of the next answer
    for role, group in groupby(rest, key=lambda message: message.role):
        run = list(group)
        if has_header and role != "assistant":
            del tokens[len(tokens) - renderer.header_size(tokens) :]
        has_header = role != "assistant"
        if role == "assistant":
            if not tokens:
                raise refusal("the first message is the assistant's, wanted a user message")
            text = "".join(_answer_text(message, form) for message in run)
            tokens += renderer.encode_answer(text)
        elif role == "tool":
            if not tokens:
                raise refusal("the first message is a tool result, wanted a user message")
            # templates number calls without a name; some refuse results that follow no calls
            calls = [NamedCall("")] * len(run) if form.is_published else ()
            tokens += renderer.append_results([message.text for message in run], calls=calls)
        else:
            text = "\n\n".join(message.text for message in run)
            tokens += renderer.append_user(text) if tokens else form.start(text, system, tools)
    return tokens


def _split_system(messages: Sequence[ChatMessage]) -> tuple[str | None, list[ChatMessage]]:
    systems = [message for message in messages if message.role in _SYSTEM_ROLES]
    rest = [message for message in messages if message.role not in _SYSTEM_ROLES]
    return ("\n\n".join(message.text for message in systems) if systems else None), rest


def _answer_text(message: ChatMessage, form: ToolForm) -> str:
    calls = "".join(form.write_call(call) for call in message.tool_calls or [])
    return message.text + calls if message.text else calls.lstrip("\n")
