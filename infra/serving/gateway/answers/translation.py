"""Answers written in the format of an API: the protocol, OpenAI's chat completions, and parts that all APIs share."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Protocol

from pydantic import ValidationError

from ostinato.infra.platform.errors import OstinatoError
from ostinato.infra.serving.gateway.answers.completions import Finished
from ostinato.infra.serving.gateway.failures import ApiError, fault_body
from ostinato.infra.serving.gateway.schemas import ChatRequest, FunctionDefinition, ToolDefinition

COMMENT = ": ping\n\n"
"""A comment, which readers of server-sent events ignore."""


class AnswerWriter(Protocol):
    """Writes one answer in the format of an API."""

    @property
    def ping(self) -> str:
        """The event that is sent while there is no other one."""
        ...

    def whole(self, finished: Finished) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        ...

    def events(self, pieces: AsyncIterator[str | Finished]) -> AsyncIterator[str]:
        """Server-sent events: text as it comes, then calls, each whole."""
        ...

    def fault(self, error: OstinatoError) -> str:
        """The event of a failure after the answer has begun."""
        ...


def function_tool(
    name: str, description: str | None, parameters: dict[str, Any] | None
) -> ToolDefinition:
    """A client's function as chat completions declare it."""
    definition = FunctionDefinition(name=name, description=description, parameters=parameters)
    return ToolDefinition(function=definition)


def translated(**fields: Any) -> ChatRequest:
    """A translated request, checked again: it may have more messages or tools than the one that was sent."""
    try:
        return ChatRequest(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ApiError(400, f"{where}: {first['msg']}", param=where) from error


def typed_event(type: str, **fields: Any) -> str:
    """A server-sent event that says its type twice, as Anthropic and the Responses API do."""
    return f"event: {type}\ndata: {json.dumps({'type': type, **fields})}\n\n"


_DONE = "data: [DONE]\n\n"


class CompletionWriter:
    """Writes one answer as a chat completion."""

    ping = COMMENT

    def __init__(self, request: ChatRequest, interaction_id: str, model: str, created: int) -> None:
        self._request = request
        self._envelope = {"id": interaction_id, "created": created, "model": model}

    def whole(self, finished: Finished) -> dict[str, Any]:
        """A `chat.completion`."""
        choice = {
            "index": 0,
            "message": _message(finished),
            "finish_reason": finished.finish_reason,
            **self._tokens_of(finished),
        }
        return {
            **self._envelope,
            "object": "chat.completion",
            **self._prompt_of(finished),
            "choices": [choice],
            "usage": finished.usage.model_dump(),
        }

    async def events(self, pieces: AsyncIterator[str | Finished]) -> AsyncIterator[str]:
        """Events with one `chat.completion.chunk` each."""
        yield self._delta({"role": "assistant", "content": ""})
        async for piece in pieces:
            if isinstance(piece, str):
                yield self._delta({"content": piece})
                continue
            for index, call in enumerate(_message(piece).get("tool_calls") or []):
                yield self._delta({"tool_calls": [{"index": index, **call}]})
            last = {"index": 0, "delta": {}, "finish_reason": piece.finish_reason}
            yield self._chunk([last | self._tokens_of(piece)], **self._prompt_of(piece))
            options = self._request.stream_options
            if options is not None and options.include_usage:
                yield self._chunk([], usage=piece.usage.model_dump())
        yield _DONE

    def fault(self, error: OstinatoError) -> str:
        """The error, and the stream's end."""
        return _event(fault_body(error)) + _DONE

    def _delta(self, delta: dict[str, Any]) -> str:
        return self._chunk([{"index": 0, "delta": delta, "finish_reason": None}])

    def _chunk(self, choices: list[dict[str, Any]], **fields: Any) -> str:
        kind = {"object": "chat.completion.chunk"}
        return _event({**self._envelope, **kind, "choices": choices, **fields})

    def _tokens_of(self, finished: Finished) -> dict[str, Any]:
        """Log-probs and ids of the choice's tokens, if the request wants them."""
        content = [token.model_dump() for token in finished.logprobs]
        logprobs = {"content": content, "refusal": None} if self._request.logprobs else None
        ids = {"token_ids": finished.token_ids} if self._request.return_token_ids else {}
        return {"logprobs": logprobs, **ids}

    def _prompt_of(self, finished: Finished) -> dict[str, Any]:
        is_asked = self._request.return_token_ids
        return {"prompt_token_ids": finished.prompt_token_ids} if is_asked else {}


def _message(finished: Finished) -> dict[str, Any]:
    message = finished.message
    body: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.tool_calls:
        body["tool_calls"] = [call.model_dump() for call in message.tool_calls]
    return body


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


async def with_pings(
    events: AsyncGenerator[str, None], ping: str, silence_seconds: float
) -> AsyncGenerator[str, None]:
    """Events as they come, and a ping after each `silence_seconds` without one.

    Each event is awaited in its own task, which pings do not interrupt. When this stream is left, `events` ends
    too: it is cancelled while it produces an event, and closed otherwise.
    """

    async def read() -> str | None:
        return await anext(events, None)

    coming = None
    try:
        while True:
            coming = asyncio.create_task(read())
            while not (await asyncio.wait({coming}, timeout=silence_seconds))[0]:
                yield ping
            event = coming.result()
            if event is None:
                return
            yield event
    finally:
        if coming is None or coming.done():
            await events.aclose()
        else:
            coming.cancel()
