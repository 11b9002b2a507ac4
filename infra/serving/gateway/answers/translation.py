"""What the translations of other APIs to chat completions share: their requests, and how answers are written."""

import json
from collections.abc import AsyncIterator
from typing import Annotated, Any, Protocol, TypeVar

from pydantic import Discriminator, Tag, ValidationError

from ostinato.infra.platform.errors import OstinatoError
from ostinato.infra.serving.gateway.answers.completions import Finished
from ostinato.infra.serving.gateway.failures import ApiError
from ostinato.infra.serving.gateway.schemas import ChatRequest, FunctionDefinition, ToolDefinition


def _form_of(content: Any) -> str:
    return "list" if isinstance(content, list) else "text"


Listed = TypeVar("Listed")
TextOr = Annotated[
    Annotated[str, Tag("text")] | Annotated[Listed, Tag("list")], Discriminator(_form_of)
]
"""A text or a list. An error describes the form that was sent."""


class AnswerWriter(Protocol):
    """One answer in the format of an API."""

    def whole(self, finished: Finished) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        ...

    def events(self, pieces: AsyncIterator[str | Finished]) -> AsyncIterator[str]:
        """Server-sent events: text as it comes, then calls, each whole."""
        ...

    def fault(self, error: OstinatoError) -> str:
        """The event of a failure after the answer has begun."""
        ...


def kind_of(block: Any, default: str = "") -> str:
    """Tag of a block: its type."""
    if isinstance(block, dict):
        return str(block.get("type", default))
    return str(getattr(block, "type", default))


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
