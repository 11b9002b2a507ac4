"""Routes that answer chats in the formats of three APIs, with their headers and error handlers."""

import logging
from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, TypeVar

from fastapi import Depends, FastAPI, Header, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import WithJsonSchema
from starlette.exceptions import HTTPException

from ostinato.infra.platform.errors import OstinatoError
from ostinato.infra.serving.gateway.answers.anthropic_messages import (
    MESSAGES_PATH,
    AnthropicErrorAnswer,
    CountRequest,
    MessagesRequest,
    MessageWriter,
    TokenCount,
    chat_request,
    error_answer,
    is_anthropic,
)
from ostinato.infra.serving.gateway.answers.completions import Finished
from ostinato.infra.serving.gateway.answers.generation import Answering
from ostinato.infra.serving.gateway.answers.openai_responses import (
    RESPONSES_PATH,
    ResponsesRequest,
    ResponseWriter,
    chat_of_response,
)
from ostinato.infra.serving.gateway.answers.translation import (
    AnswerWriter,
    CompletionWriter,
    with_pings,
)
from ostinato.infra.serving.gateway.config import Caller, GatewayConfig
from ostinato.infra.serving.gateway.failures import check_model, error_body, fault_answer
from ostinato.infra.serving.gateway.schemas import (
    AgentMessageRequest,
    AgentSessionRequest,
    ChatRequest,
)
from ostinato.infra.serving.gateway.tenants import Spending

logger = logging.getLogger(__name__)


class Chats(Protocol):
    """A chat service: it checks a request, then answers it whole or as a stream."""

    async def begin(
        self, request: ChatRequest, tenant: Caller, client_session: str | None
    ) -> Answering: ...

    async def count_tokens(self, request: ChatRequest) -> int: ...

    async def answer(self, answering: Answering) -> Finished: ...

    def stream(self, answering: Answering) -> AsyncGenerator[str | Finished, None]: ...


class Answerer(Protocol):
    """The services behind the routes, found as `app.state.gateway`."""

    @property
    def config(self) -> GatewayConfig: ...

    def chat_of(self, caller: Caller) -> Chats: ...

    def spending(self, tenant: Caller) -> AbstractContextManager[Spending]:
        """The tokens of a request that lasts as long as the block. ApiError when the caller has none left."""
        ...

    def wall_clock(self) -> float: ...


async def _tenant_of(
    request: Request, authorization: Annotated[str | None, Header()] = None
) -> Caller:
    """The caller that the middleware admitted. The header is a parameter so that the schema names it."""
    return request.state.caller


Tenant = Annotated[Caller, Depends(_tenant_of)]


async def _spending_of(request: Request, tenant: Tenant) -> AsyncGenerator[Spending, None]:
    with request.app.state.gateway.spending(tenant) as spending:
        yield spending


Spender = Annotated[Spending, Depends(_spending_of)]
"""A tenant that has tokens left today, for as long as its request lasts: streams too."""


StorableRequest = TypeVar("StorableRequest", ChatRequest, AgentSessionRequest, AgentMessageRequest)


@dataclass(frozen=True, slots=True)
class ClientHeaders:
    """Our own headers, which requests for answers may have in any API."""

    session: str | None
    store: bool | None

    def applied(self, request: StorableRequest) -> StorableRequest:
        """The request with the header's `store`, which wins: some clients always send one in the body."""
        return request if self.store is None else request.model_copy(update={"store": self.store})


async def _headers_of(
    x_ostinato_session: Annotated[
        str | None,
        Header(max_length=200, description="name that joins requests of a client into one session"),
    ] = None,
    x_ostinato_store: Annotated[
        bool | None,
        Header(description="`store` of the body, over which it takes precedence"),
        WithJsonSchema({"type": "boolean"}),  # a header cannot be null
    ] = None,
) -> ClientHeaders:
    return ClientHeaders(x_ostinato_session, x_ostinato_store)


Headers = Annotated[ClientHeaders, Depends(_headers_of)]


def add_openai_routes(app: FastAPI, gateway: Answerer) -> None:
    """Models, chat completions and responses."""
    config = gateway.config
    model = {
        "id": config.model_name,
        "object": "model",
        "created": 0,
        "owned_by": "ostinato",
        # limits and tools for a client that runs the tools itself, as in training
        "harness": config.harness.model_dump(mode="json"),
    }

    @app.get("/v1/models")
    async def list_models(tenant: Tenant) -> dict[str, Any]:
        """Lists the one model that is served, with the harness that it was trained in."""
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{model_id:path}")
    async def retrieve_model(model_id: str, tenant: Tenant) -> dict[str, Any]:
        """Returns the served model. Another id is a 404, `model_not_found`."""
        check_model(model_id, config.model_name)
        return model

    @app.post("/v1/chat/completions", response_model=None)
    async def complete_chat(
        request: ChatRequest,
        spending: Spender,
        headers: Headers,
        http: Request,
    ) -> Response:
        """Answers a chat in the format of OpenAI's chat completions, whole or streamed."""
        chats = gateway.chat_of(spending.caller)
        answering = await _begin(chats, headers.applied(request), spending, headers)
        created = int(gateway.wall_clock())
        writer = CompletionWriter(request, answering.interaction_id, config.model_name, created)
        return await _answer(gateway, chats, answering, writer, http)

    @app.post(RESPONSES_PATH, response_model=None)
    async def create_response(
        request: ResponsesRequest,
        spending: Spender,
        headers: Headers,
        http: Request,
    ) -> Response:
        """Answers in the format of OpenAI's Responses API, whole or as events. The server keeps no state."""
        chat = headers.applied(chat_of_response(request, config.model_name))
        chats = gateway.chat_of(spending.caller)
        answering = await _begin(chats, chat, spending, headers)
        writer = ResponseWriter(request, answering.interaction_id, int(gateway.wall_clock()))
        return await _answer(gateway, chats, answering, writer, http)


def add_anthropic_routes(app: FastAPI, gateway: Answerer) -> None:
    """Messages."""
    model = gateway.config.model_name
    errors: dict[int | str, dict[str, Any]] = {
        status: {"model": AnthropicErrorAnswer} for status in ("4XX", "5XX")
    }

    @app.post(MESSAGES_PATH, response_model=None, responses=errors)
    async def create_message(
        request: MessagesRequest,
        spending: Spender,
        headers: Headers,
        http: Request,
    ) -> Response:
        """Answers in the format of Anthropic's Messages API, whole or as events."""
        chat = headers.applied(chat_request(request, model))
        chats = gateway.chat_of(spending.caller)
        answering = await _begin(chats, chat, spending, headers)
        writer = MessageWriter(answering.interaction_id, model, answering.prompt_tokens)
        return await _answer(gateway, chats, answering, writer, http)

    @app.post(f"{MESSAGES_PATH}/count_tokens", responses=errors)
    async def count_tokens(request: CountRequest, tenant: Tenant) -> TokenCount:
        """Counts the tokens of a prompt without answering it."""
        chat = chat_request(request, model)
        return TokenCount(input_tokens=await gateway.chat_of(tenant).count_tokens(chat))


async def _begin(
    chats: Chats, request: ChatRequest, spending: Spending, headers: ClientHeaders
) -> Answering:
    """The answer's beginning, for which its caller has tokens left."""
    answering = await chats.begin(request, spending.caller, headers.session)
    spending.reserve(answering.prompt_tokens + answering.budget_tokens)
    return answering


async def _answer(
    gateway: Answerer, chats: Chats, answering: Answering, writer: AnswerWriter, http: Request
) -> Response:
    """The answer in its API's format: a stream of events or one body, as the request asks."""
    headers = {"x-ostinato-interaction": answering.interaction_id}
    if answering.request.stream:
        answer = _stream_events(chats, answering, writer)
        events = with_pings(answer, writer.ping, gateway.config.ping_seconds)
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)
    answering.is_client_gone = http.is_disconnected
    finished = await chats.answer(answering)
    answering.is_delivered = not await http.is_disconnected()
    return JSONResponse(writer.whole(finished), headers=headers)


async def _stream_events(
    chats: Chats, answering: Answering, writer: AnswerWriter
) -> AsyncGenerator[str, None]:
    """Events of one answer. A failure becomes an event, since the HTTP status has already been sent."""
    try:
        async with aclosing(chats.stream(answering)) as pieces:
            async for event in writer.events(pieces):
                yield event
    except OstinatoError as error:
        logger.error("interaction=%s stream_failed=%s", answering.interaction_id, error)
        yield writer.fault(error)


def _http_message(error: HTTPException) -> str:
    """Message for a refusal by FastAPI or Starlette."""
    if error.status_code == 400:  # for example a number with thousands of digits
        return "body is no JSON that this server can parse, wanted an object"
    return str(error.detail)


def answer_errors(app: FastAPI) -> None:
    """Adds handlers that answer every failure in OpenAI's error format."""

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        body = (
            error.detail
            if isinstance(error.detail, dict)
            else error_body(_http_message(error), code="http_error")
        )
        return JSONResponse(body, status_code=error.status_code, headers=error.headers)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            at = f"{first['ctx']['error']} at character {first['loc'][-1]}"
            return JSONResponse(
                error_body(f"body is no JSON: {at}", code="invalid_value"), status_code=400
            )
        where = ".".join(str(part) for part in first["loc"][1:]) or "body"
        seen = repr(first.get("input"))
        message = f"{where} is {seen if len(seen) < 200 else seen[:200] + '..'}: {first['msg'].removeprefix('Value error, ')}"
        return JSONResponse(error_body(message, code="invalid_value", param=where), status_code=400)

    @app.exception_handler(OstinatoError)
    async def failed(request: Request, error: OstinatoError) -> JSONResponse:
        logger.error("path=%r failed=%s", request.url.path, error)
        return fault_answer(error)

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> JSONResponse:
        logger.error("path=%r broken=%r", request.url.path, error)
        body = error_body("a fault of this server; see its log", code="internal_error")
        if is_anthropic(request.url.path):  # AnthropicErrors does not see this answer
            body = error_answer(500, body)
        return JSONResponse(body, status_code=500)
