"""Anthropic's Messages API over chat completions: requests in, messages, events and errors out.

For clients such as Claude Code. A request becomes a `ChatRequest`, so sessions, limits, records and
refusals are those of `/v1/chat/completions`. Fields and values are those of the `anthropic` package
2.14 and, where it has none, those that Claude Code 2.1.332 was observed to send.
"""

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ostinato.infra.platform.errors import OstinatoError
from ostinato.infra.serving.gateway.answers.completions import MAX_STOPS, Finished
from ostinato.infra.serving.gateway.answers.translation import (
    function_tool,
    translated,
    typed_event,
)
from ostinato.infra.serving.gateway.config import MAX_MESSAGES
from ostinato.infra.serving.gateway.failures import (
    ApiError,
    NeutralValues,
    check_model,
    check_neutral,
    fault_body,
    fault_status,
)
from ostinato.infra.serving.gateway.schemas import (
    ChatMessage,
    ChatRequest,
    FunctionCall,
    OpenAIWire,
    SampledRequest,
    Text,
    TextOr,
    TextPart,
    ToolCall,
    Wire,
    kind_of,
)

MESSAGES_PATH = "/v1/messages"
NEUTRAL_VALUES: NeutralValues = {
    "container": ((None,), "no tool runs on the server"),
    "mcp_servers": ((None, []), "no tool runs on the server"),
    "output_config": (
        (None, {}),
        "the model answers in free text, and its chat template decides whether it thinks",
    ),
    "output_format": ((None,), "the model answers in free text"),
    "thinking": (
        (None, {"type": "adaptive"}, {"type": "disabled"}),
        "the model's chat template decides whether it thinks",
    ),
    "tool_choice": (
        (
            None,
            {"type": "auto"},
            {"type": "none"},
            {"type": "auto", "disable_parallel_tool_use": False},
        ),
        "the model decides which tools it calls",
    ),
    "top_k": ((None,), "only temperature and top_p change the sampling"),
}
_IGNORED_KEYS = {("output_config", "effort"), ("thinking", "display")}  # Claude Code sends both
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class ToolUse(OpenAIWire):
    """A call in an assistant message."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResult(OpenAIWire):
    """The result of a tool."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Text = ""
    is_error: bool | None = None

    @property
    def text(self) -> str:
        """The content, marked as an error when the tool failed."""
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return f"error: {text}" if self.is_error else text


Block = Annotated[
    Annotated[TextPart, Tag("text")]
    | Annotated[ToolUse, Tag("tool_use")]
    | Annotated[ToolResult, Tag("tool_result")],
    Discriminator(
        kind_of,
        custom_error_type="block_type",
        custom_error_message="wanted a block of type text, tool_use or tool_result: the model reads only text",
    ),
]


class AnthropicMessage(OpenAIWire):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: TextOr[Annotated[list[Block], Field(fail_fast=True)]]

    @property
    def blocks(self) -> list[TextPart | ToolUse | ToolResult]:
        if isinstance(self.content, str):
            return [TextPart(type="text", text=self.content)]
        return self.content


class AnthropicTool(OpenAIWire):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None  # first, so that an error names a tool of the server
    name: str
    description: str | None = None
    input_schema: dict[str, Any]


class CountRequest(OpenAIWire):
    """POST /v1/messages/count_tokens."""

    model_config = ConfigDict(extra="allow")  # kept, since some are refused by name

    model: str
    """id that GET /v1/models gives"""
    messages: list[AnthropicMessage] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    """conversation so far"""
    system: Text | None = None
    """system prompt"""
    tools: list[AnthropicTool] | None = Field(default=None, max_length=128, fail_fast=True)
    """functions of the client"""
    tool_choice: dict[str, Any] | None = None
    """choice of tools: auto or none"""


class MessagesRequest(SampledRequest, CountRequest):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1)
    """sampled tokens, at most"""
    stop_sequences: list[Annotated[str, Field(min_length=1)]] | None = Field(
        default=None, max_length=MAX_STOPS, fail_fast=True
    )
    """strings that end the answer"""


class TokenCount(Wire):
    """Tokens of a prompt."""

    input_tokens: int


class AnthropicError(Wire):
    """A refusal or a fault in Anthropic's format."""

    type: str
    message: str


class AnthropicErrorAnswer(Wire):
    """Body of every answer with a status of 400 or more."""

    type: Literal["error"] = "error"
    error: AnthropicError


def chat_request(request: CountRequest, served_model: str) -> ChatRequest:
    """The same request as a chat completion. ApiError for fields that would change the answer in an unsupported way."""
    check_model(request.model, served_model)
    check_neutral(request, NEUTRAL_VALUES, _IGNORED_KEYS)
    messages = [each for message in request.messages for each in _chat_messages(message)]
    if request.system:
        messages.insert(0, ChatMessage(role="system", content=request.system))
    tools = [
        function_tool(tool.name, tool.description, tool.input_schema)
        for tool in request.tools or ()
    ]
    sampling: dict[str, Any] = {}
    if isinstance(request, MessagesRequest):
        sampling = {
            "max_tokens": request.max_tokens,
            "stream": request.stream,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "stop": request.stop_sequences or None,
            "store": request.store,
        }
    return translated(
        model=request.model,
        messages=messages,
        tools=tools or None,
        tool_choice=(request.tool_choice or {}).get("type"),
        **sampling,
    )


def _chat_messages(message: AnthropicMessage) -> Iterator[ChatMessage]:
    """Each tool result becomes a message. The results come before the text."""
    texts: list[TextPart] = []
    calls: list[ToolCall] = []
    for block in message.blocks:
        if isinstance(block, TextPart):
            texts.append(block)
        elif isinstance(block, ToolUse):
            call = FunctionCall(name=block.name, arguments=json.dumps(block.input))
            calls.append(ToolCall(id=block.id, function=call))
        else:
            yield ChatMessage(role="tool", content=block.text, tool_call_id=block.tool_use_id)
    if calls and message.role != "assistant":
        raise ApiError(
            400,
            f"a tool_use block is in a message of role {message.role!r}, wanted 'assistant'",
            param="messages",
        )
    if texts or calls or not message.blocks:
        yield ChatMessage(role=message.role, content=texts or None, tool_calls=calls or None)


class MessageWriter:
    """Writes one answer as an Anthropic message."""

    ping = typed_event("ping")

    def __init__(self, interaction_id: str, model: str, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._start = {"id": interaction_id, "type": "message", "role": "assistant", "model": model}

    def whole(self, finished: Finished) -> dict[str, Any]:
        """The message."""
        blocks: list[dict[str, Any]] = []
        if finished.message.text:
            blocks.append({"type": "text", "text": finished.message.text})
        return {
            **self._start,
            "content": [*blocks, *_tool_uses(finished)],
            **_ending(finished),
            "usage": _usage(finished.usage.prompt_tokens, finished.usage.completion_tokens),
        }

    async def events(self, pieces: AsyncIterator[str | Finished]) -> AsyncIterator[str]:
        """The message block by block."""
        start: dict[str, Any] = {
            **self._start,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(self._prompt_tokens, 0),
        }
        yield typed_event("message_start", message=start)
        index = 0
        has_text = False
        async for piece in pieces:
            if isinstance(piece, str):
                if not has_text:
                    has_text = True
                    text = {"type": "text", "text": ""}
                    yield typed_event("content_block_start", index=index, content_block=text)
                delta = {"type": "text_delta", "text": piece}
                yield typed_event("content_block_delta", index=index, delta=delta)
                continue
            if has_text:
                yield typed_event("content_block_stop", index=index)
                index += 1
            for block in _tool_uses(piece):
                arguments = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
                opened = {**block, "input": {}}
                yield typed_event("content_block_start", index=index, content_block=opened)
                yield typed_event("content_block_delta", index=index, delta=arguments)
                yield typed_event("content_block_stop", index=index)
                index += 1
            usage = _usage(piece.usage.prompt_tokens, piece.usage.completion_tokens)
            yield typed_event("message_delta", delta=_ending(piece), usage=usage)
            yield typed_event("message_stop")

    def fault(self, error: OstinatoError) -> str:
        """An `error` event."""
        return typed_event(**error_answer(fault_status(error), fault_body(error)))


class AnthropicErrors:
    """Middleware that writes refusals and faults below MESSAGES_PATH in Anthropic's format."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes everything on, and rewrites the bodies of errors, which are short."""
        if scope["type"] != "http" or not is_anthropic(scope["path"]):
            await self._app(scope, receive, send)
            return
        held: Message | None = None  # the head of an error, until its body is rewritten

        async def send_translated(message: Message) -> None:
            nonlocal held
            if message["type"] == "http.response.start" and message["status"] >= 400:
                held = message
                return
            if held is not None:
                head, held = held, None
                if message.get("body"):
                    answer = error_answer(head["status"], json.loads(message["body"]))
                    message = {**message, "body": json.dumps(answer).encode()}
                    length = str(len(message["body"]))
                    MutableHeaders(scope=head)["content-length"] = length
                await send(head)
            await send(message)

        await self._app(scope, receive, send_translated)


def is_anthropic(path: str) -> bool:
    """Whether a path belongs to Anthropic's API."""
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


def error_answer(status: int, body: Mapping[str, Any]) -> dict[str, Any]:
    """Anthropic's form of an error body in OpenAI's format."""
    kind = _ERROR_TYPES.get(status, "api_error" if status >= 500 else _ERROR_TYPES[400])
    return {"type": "error", "error": {"type": kind, "message": body["error"]["message"]}}


def _tool_uses(finished: Finished) -> list[dict[str, Any]]:
    return [
        {
            "type": "tool_use",
            "id": call.id,
            "name": call.function.name,
            "input": json.loads(call.function.arguments),
        }
        for call in finished.message.tool_calls or ()
    ]


def _ending(finished: Finished) -> dict[str, str | None]:
    reason = _STOP_REASONS[finished.finish_reason]
    if reason == "end_turn" and finished.stop_string is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": finished.stop_string}


def _usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {"input_tokens": prompt_tokens, "output_tokens": completion_tokens}
