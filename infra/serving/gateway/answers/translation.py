"""What the translations of other APIs to chat completions share: their requests, and how answers are written."""

import json
from collections.abc import AsyncIterator
from typing import Any, Protocol

from pydantic import ValidationError

from ostinato.infra.platform.errors import OstinatoError
from ostinato.infra.serving.gateway.answers.completions import Finished
from ostinato.infra.serving.gateway.failures import ApiError
from ostinato.infra.serving.gateway.schemas import ChatRequest, FunctionDefinition, ToolDefinition

COMMENT = ": ping\n\n"
"""What readers of server-sent events pass over."""


class AnswerWriter(Protocol):
    """One answer in the format of an API."""

    @property
    def ping(self) -> str:
        """What is sent while there is nothing to tell."""
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
    """A translated request. It may have more messages or tools than the one that was sent, so it is checked again."""
    try:
        return ChatRequest(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ApiError(400, f"{where}: {first['msg']}", param=where) from error


def typed_event(type: str, **fields: Any) -> str:
    """A server-sent event that says its type twice, as Anthropic and the Responses API do."""
    return f"event: {type}\ndata: {json.dumps({'type': type, **fields})}\n\n"
