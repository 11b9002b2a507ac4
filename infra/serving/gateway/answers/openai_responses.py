"""OpenAI's Responses API over chat completions: requests in, responses and events out.

For clients such as Codex. A request becomes a `ChatRequest`, so sessions, limits, records and refusals are those
of `/v1/chat/completions`. Fields and values are those of the `openai` package 3.54 and, where it has none, those that
Codex 0.171.0 was observed to send.
"""

import json
from collections.abc import AsyncIterator, Iterable, Iterator
from itertools import count
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Discriminator, Field, Tag

from ostinato.infra.platform.errors import OstinatoError
from ostinato.infra.serving.gateway.answers.completions import NEUTRAL_VALUES as NEUTRAL_IN_CHATS
from ostinato.infra.serving.gateway.answers.completions import Finished
from ostinato.infra.serving.gateway.answers.translation import (
    COMMENT,
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
    TextOr,
    ToolCall,
    kind_of,
)

RESPONSES_PATH = "/v1/responses"
_WHOLE_INPUT = "nothing is kept between requests: send the whole conversation as input"
_FITTING_INPUT = "the input is never shortened: send one that fits the context"
NEUTRAL_VALUES: NeutralValues = {
    "background": ((None, False), "clients wait for their answers"),
    "context_management": ((None, []), _FITTING_INPUT),
    "conversation": ((None,), _WHOLE_INPUT),
    "moderation": NEUTRAL_IN_CHATS["moderation"],
    "parallel_tool_calls": NEUTRAL_IN_CHATS["parallel_tool_calls"],
    "previous_response_id": ((None,), _WHOLE_INPUT),
    "prompt": ((None,), "no prompts are stored here: send instructions and input"),
    "prompt_cache_options": ((None, {}, {"prewarm": False}), "every request is answered"),
    "reasoning": (
        (None, {}, {"mode": "standard"}),
        "the model's chat template decides whether it thinks",
    ),
    "text": ((None, {}, {"format": {"type": "text"}}), "the model answers in free text"),
    "tool_choice": NEUTRAL_IN_CHATS["tool_choice"],
    "truncation": ((None, "disabled"), _FITTING_INPUT),
}
# Codex sends effort, summary and verbosity as its user has set them
_IGNORED_KEYS = {
    *(("prompt_cache_options", key) for key in ("comparison_response_id", "mode", "ttl")),
    *(("reasoning", key) for key in ("context", "effort", "generate_summary", "summary")),
    ("text", "verbosity"),
}
_LOGPROBS = "message.output_text.logprobs"
Unoffered = Literal["custom", "image_generation", "local_shell", "tool_search", "web_search"]


class ContentPart(OpenAIWire):
    """A piece of text."""

    type: Literal["input_text", "output_text"]  # first, so that an error names an image or a file
    text: str


Content = TextOr[Annotated[list[ContentPart], Field(fail_fast=True)]]


class MessageItem(OpenAIWire):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class CallItem(OpenAIWire):
    """A call of a function."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class OutputItem(OpenAIWire):
    """The result of a function."""

    type: Literal["function_call_output"]
    call_id: str | None = None
    output: Content


class ReasoningItem(OpenAIWire):
    """Thoughts, which are ignored: the served model wrote none outside of its text."""

    type: Literal["reasoning"]


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        lambda item: kind_of(item, "message"),
        custom_error_type="item_type",
        custom_error_message="wanted an item of type message, function_call, function_call_output or reasoning",
    ),
]


def _check_finite(parameters: dict[str, Any]) -> dict[str, Any]:
    json.dumps(parameters, allow_nan=False)  # ValueError: the response could not repeat them
    return parameters


class FunctionTool(OpenAIWire):
    """A function that the client runs."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_check_finite)] | None = None


class UnofferedTool(OpenAIWire):
    """A tool that Codex always lists and that the model is not offered: it runs on the server or takes free text."""

    type: Unoffered


def _kind_of_tool(tool: Any) -> str:
    kind = kind_of(tool)
    return "unoffered" if kind in get_args(Unoffered) else kind


PlainTool = Annotated[FunctionTool, Tag("function")] | Annotated[UnofferedTool, Tag("unoffered")]
_IS_PLAIN = Discriminator(_kind_of_tool, "tool_type", "wanted a tool of type function")


class Namespace(OpenAIWire):
    """Functions under one name, for example those of one MCP server of the client."""

    type: Literal["namespace"]
    name: str
    description: str = Field(default="", description="text that is not shown to the model")
    tools: list[Annotated[PlainTool, _IS_PLAIN]] = Field(max_length=128, fail_fast=True)


Tool = Annotated[
    PlainTool | Annotated[Namespace, Tag("namespace")],
    Discriminator(
        _kind_of_tool,
        custom_error_type="tool_type",
        custom_error_message="wanted a tool of type function or namespace, which the client runs; "
        f"{', '.join(get_args(Unoffered))} are not offered to the model",
    ),
]
Items = Annotated[list[Item], Field(min_length=1, max_length=2 * MAX_MESSAGES, fail_fast=True)]


class ResponsesRequest(SampledRequest):
    """POST /v1/responses."""

    input: TextOr[Items]
    """text of the user, or items; text and calls of one answer count as one of 512 messages"""
    instructions: str | None = None
    """system prompt"""
    max_output_tokens: int | None = Field(default=None, ge=1)
    """sampled tokens, at most"""
    tools: list[Tool] | None = Field(default=None, max_length=128, fail_fast=True)
    """functions of the client, and tools that are accepted without being offered"""
    tool_choice: Any = None
    """choice of tools: auto or none"""
    include: list[str] | None = Field(default=None, fail_fast=True)
    """extras of the answer: `message.output_text.logprobs`; others are accepted without effect"""
    top_logprobs: int | None = None
    """number of likeliest tokens per position, 0 to 20"""


def chat_of_response(request: ResponsesRequest, served_model: str) -> ChatRequest:
    """The same request as a chat completion. ApiError for fields that would change the answer in an unsupported way."""
    check_model(request.model, served_model)
    definitions = [
        function_tool(_full_name(namespace, tool.name), tool.description, tool.parameters)
        for namespace, tool in _functions(request)
    ]
    chat = translated(
        model=request.model,
        messages=_chat_messages(request),
        tools=definitions or None,
        tool_choice=request.tool_choice,
        stream=request.stream,
        temperature=request.temperature,
        top_p=request.top_p,
        max_tokens=request.max_output_tokens,
        logprobs=_LOGPROBS in (request.include or ()) or bool(request.top_logprobs),
        top_logprobs=request.top_logprobs,
        store=request.store,
    )
    check_neutral(request, NEUTRAL_VALUES, _IGNORED_KEYS, has_tools=bool(chat.offered_tools))
    names = [tool.function.name for tool in definitions]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:  # a call would not show which tool it means
        raise ApiError(400, f"two tools are named {twice!r}, wanted one", param="tools")
    return chat


def _chat_messages(request: ResponsesRequest) -> list[ChatMessage]:
    """An assistant's message and the calls after it become one message."""
    items = request.input
    if isinstance(items, str):
        items = [MessageItem(role="user", content=items)]
    messages: list[ChatMessage] = []
    if request.instructions:
        messages.append(ChatMessage(role="system", content=request.instructions))
    for item in items:
        if isinstance(item, MessageItem):
            messages.append(ChatMessage(role=item.role, content=_text_of(item.content)))
        elif isinstance(item, OutputItem):
            result = _text_of(item.output)
            messages.append(ChatMessage(role="tool", content=result, tool_call_id=item.call_id))
        elif isinstance(item, CallItem):
            if not messages or messages[-1].role != "assistant":
                messages.append(ChatMessage(role="assistant"))
            name = _full_name(item.namespace, item.name)
            function = FunctionCall(name=name, arguments=item.arguments)
            messages[-1].tool_calls = messages[-1].tool_calls or []
            messages[-1].tool_calls.append(ToolCall(id=item.call_id, function=function))
    return messages


def _text_of(content: str | list[ContentPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _functions(request: ResponsesRequest) -> Iterator[tuple[str | None, FunctionTool]]:
    """Functions with the namespaces that contain them."""
    for tool in request.tools or ():
        if isinstance(tool, FunctionTool):
            yield None, tool
        elif isinstance(tool, Namespace):
            yield from ((tool.name, each) for each in tool.tools if isinstance(each, FunctionTool))


def _full_name(namespace: str | None, name: str) -> str:
    return f"{namespace}.{name}" if namespace else name


class ResponseWriter:
    """Writes one answer as a response."""

    ping = COMMENT

    def __init__(self, request: ResponsesRequest, interaction_id: str, created_at: int) -> None:
        self._request, self._id, self._created_at = request, interaction_id, created_at
        self._numbers = count()
        message_id = f"msg_{interaction_id[-32:]}"
        self._text_place = {"item_id": message_id, "output_index": 0, "content_index": 0}
        self._names = {
            _full_name(namespace, tool.name): {"name": tool.name, "namespace": namespace}
            for namespace, tool in _functions(request)
            if namespace
        }

    def whole(self, finished: Finished) -> dict[str, Any]:
        """The response."""
        return self._ended(finished, self._output(finished))

    async def events(self, pieces: AsyncIterator[str | Finished]) -> AsyncIterator[str]:
        """Events of the response's items, the message before the calls."""
        yield self._event("response.created", response=self._body("in_progress"))
        yield self._event("response.in_progress", response=self._body("in_progress"))
        is_open = False
        async for piece in pieces:
            if isinstance(piece, str):
                if not is_open:
                    is_open = True
                    for event in self._opening():
                        yield event
                text = {"delta": piece, "logprobs": []}
                yield self._event("response.output_text.delta", **self._text_place, **text)
                continue
            for event in self._closing(piece, is_open=is_open):
                yield event

    def fault(self, error: OstinatoError) -> str:
        """A `response.failed` event."""
        message = fault_body(error)["error"]["message"]
        code = "server_error" if fault_status(error) >= 500 else "invalid_prompt"
        failed = self._body("failed", error={"code": code, "message": message})
        return self._event("response.failed", response=failed)

    def _opening(self) -> Iterator[str]:
        """Events that begin the message."""
        item = self._message("in_progress", [])
        yield self._event("response.output_item.added", output_index=0, item=item)
        part = _text_part("")
        yield self._event("response.content_part.added", **self._text_place, part=part)

    def _closing(self, finished: Finished, *, is_open: bool) -> Iterator[str]:
        """Events after the last piece of text."""
        output = self._output(finished)
        for index, item in enumerate(output):
            if item["type"] == "message":
                if not is_open:
                    yield from self._opening()
                (part,) = item["content"]
                text = {"text": part["text"], "logprobs": part["logprobs"]}
                yield self._event("response.output_text.done", **self._text_place, **text)
                yield self._event("response.content_part.done", **self._text_place, part=part)
            else:
                args, place = item["arguments"], {"output_index": index, "item_id": item["id"]}
                opened = {**item, "arguments": "", "status": "in_progress"}
                yield self._event("response.output_item.added", output_index=index, item=opened)
                yield self._event("response.function_call_arguments.delta", **place, delta=args)
                yield self._event("response.function_call_arguments.done", **place, arguments=args)
            yield self._event("response.output_item.done", output_index=index, item=item)
        body = self._ended(finished, output)
        yield self._event(f"response.{body['status']}", response=body)

    def _output(self, finished: Finished) -> list[dict[str, Any]]:
        """Items of the answer. An empty answer is an empty message, so that the history contains it."""
        text, calls = finished.message.text, finished.message.tool_calls or ()
        items: list[dict[str, Any]] = []
        if text or not calls:
            logprobs = [token.model_dump() for token in finished.logprobs]
            items.append(self._message(_status(finished), [_text_part(text, logprobs)]))
        for index, call in enumerate(calls):
            name, arguments = call.function.name, call.function.arguments
            item = {"type": "function_call", "id": f"fc_{self._id[-32:]}_{index}"}
            item |= {"call_id": call.id, "arguments": arguments, "status": "completed"}
            items.append(item | self._names.get(name, {"name": name}))
        return items

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        start = {"type": "message", "id": self._text_place["item_id"], "role": "assistant"}
        return {**start, "status": status, "content": content}

    def _ended(self, finished: Finished, output: list[dict[str, Any]]) -> dict[str, Any]:
        status = _status(finished)
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        usage = {
            "input_tokens": finished.usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": finished.usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": finished.usage.total_tokens,
        }
        return self._body(status, output=output, incomplete_details=reason, usage=usage)

    def _body(self, status: str, **fields: Any) -> dict[str, Any]:
        """The response with a status, and with the request as it was understood."""
        request = self._request
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": {},
            "model": request.model,
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "temperature": request.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": _describe_tools(request.tools or ()),
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": None,
            **fields,
        }

    def _event(self, type: str, **fields: Any) -> str:
        return typed_event(type, sequence_number=next(self._numbers), **fields)


def _describe_tools(
    tools: Iterable[FunctionTool | UnofferedTool | Namespace],
) -> list[dict[str, Any]]:
    """Tools as they were understood."""
    described: list[dict[str, Any]] = []
    for tool in tools:
        if isinstance(tool, FunctionTool):
            described.append({**tool.model_dump(), "strict": False})
        elif isinstance(tool, Namespace):
            described.append({**tool.model_dump(), "tools": _describe_tools(tool.tools)})
    return described


def _status(finished: Finished) -> str:
    return "incomplete" if finished.finish_reason == "length" else "completed"


def _text_part(text: str, logprobs: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}
