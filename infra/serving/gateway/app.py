"""The HTTP API as a FastAPI application.

`build_app`: routes, authentication, rate limits, error answers. The work is in answers/; nothing
listens here (server.py does).
"""

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI, Header, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import WithJsonSchema
from starlette.exceptions import HTTPException

from ostinato.infra.platform.errors import OstinatoError
from ostinato.infra.serving.gateway.answers.agents import AgentService
from ostinato.infra.serving.gateway.answers.anthropic_messages import (
    MESSAGES_PATH,
    AnthropicErrorAnswer,
    AnthropicErrors,
    CountRequest,
    MessagesRequest,
    MessageWriter,
    TokenCount,
    chat_request,
    error_answer,
    is_anthropic,
)
from ostinato.infra.serving.gateway.answers.completions import ChatService
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
from ostinato.infra.serving.gateway.config import Caller
from ostinato.infra.serving.gateway.context import GatewayContext
from ostinato.infra.serving.gateway.failures import (
    ApiError,
    check_model,
    error_body,
    fault_answer,
)
from ostinato.infra.serving.gateway.limits import ARCHIVE_BODY, UPLOADS_PATH, RequestLimits
from ostinato.infra.serving.gateway.metrics import METRICS_TYPE, CountRequests, Metrics
from ostinato.infra.serving.gateway.recorder import PRIVATE_PREFIX, InteractionRecorder
from ostinato.infra.serving.gateway.schemas import (
    AgentAnswer,
    AgentMessageRequest,
    AgentSessionRequest,
    ChatRequest,
    ErrorAnswer,
    FeedbackAnswer,
    FeedbackRequest,
    RepositoryAnswer,
    RepositoryList,
)
from ostinato.infra.serving.gateway.tenants import DAY_SECONDS, Tenants
from ostinato.infra.serving.gateway.uploads.store import Upload, Uploads

logger = logging.getLogger(__name__)


class Gateway:
    """The services of one application."""

    def __init__(self, context: GatewayContext) -> None:
        self.context = context
        config = context.config
        self.tenants = Tenants(config.tenants, context.issued_keys)
        self.recorder = InteractionRecorder(
            config.line, context.ledger, context.objects, context.wall_clock, self.tenants.spend
        )
        self.chat = ChatService(context, self.recorder)
        self.agents = AgentService(context, self.recorder)
        self.metrics = Metrics(self.recorder.counters, lambda: len(self.agents.sessions))
        self.started = context.clock()

    def authenticate(self, authorization: str | None) -> Caller:
        """The caller of a bearer key, counted against its rate limit."""
        scheme, _, key = (authorization or "").partition(" ")
        tenant = self.tenants.identify(key.strip()) if scheme.lower() == "bearer" else None
        if tenant is None:
            raise ApiError(
                401,
                "API key is missing or unknown, wanted 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                code="invalid_api_key",
            )
        wait_seconds = self.tenants.admit(tenant, self.context.clock())
        if wait_seconds:
            self.recorder.counters[tenant.name]["rate_limited"] += 1
            raise ApiError(
                429,
                f"{tenant.account} asks faster than {tenant.rate_limit.requests_per_minute:g} "
                "requests per minute",
                code="rate_limit_exceeded",
                retry_after_seconds=wait_seconds,
            )
        return tenant

    def require_tokens(self, tenant: Caller) -> Caller:
        """The caller, if any of its day's tokens are left. Answers under way are not cut."""
        now = self.context.wall_clock()
        if self.tenants.tokens_left(tenant, now) == 0:
            self.recorder.counters[tenant.name]["over_budget"] += 1
            raise ApiError(
                429,
                f"{tenant.account} has used its {tenant.tokens_per_day} tokens of today (UTC)",
                code="insufficient_quota",
                retry_after_seconds=DAY_SECONDS - now % DAY_SECONDS,
            )
        return tenant

    def status(self, tenant: Caller) -> dict[str, Any]:
        """One tenant's own numbers. Nothing of other tenants, arms or checkpoints."""
        return {
            "uptime_seconds": self.context.clock() - self.started,
            "open_sessions": self.agents.count_sessions(tenant),
            "repositories": list(self.context.workplaces.names(tenant.name)),
            "tokens_left_today": self.tenants.tokens_left(tenant, self.context.wall_clock()),
            "counters": dict(sorted(self.recorder.counters[tenant.name].items())),
        }


async def _tenant_of(
    request: Request, authorization: Annotated[str | None, Header()] = None
) -> Caller:
    """The caller that the middleware let in. The header is a parameter for the published schema."""
    return request.state.caller


Tenant = Annotated[Caller, Depends(_tenant_of)]


async def _spender_of(request: Request, tenant: Tenant) -> Caller:
    return request.app.state.gateway.require_tokens(tenant)


Spender = Annotated[Caller, Depends(_spender_of)]
"""A tenant that has tokens left today."""


Asked = TypeVar("Asked", ChatRequest, AgentSessionRequest)


@dataclass(frozen=True, slots=True)
class ClientHeaders:
    """Our own headers of requests that begin an interaction, in any API."""

    session: str | None
    store: bool | None

    def applied(self, asked: Asked) -> Asked:
        """The user's word comes before the body's, where some clients send `store` unasked."""
        return asked if self.store is None else asked.model_copy(update={"store": self.store})


async def _headers_of(
    x_ostinato_session: Annotated[str | None, Header(max_length=200)] = None,
    x_ostinato_store: Annotated[
        bool | None,
        Header(),
        WithJsonSchema({"type": "boolean"}),  # no text in a header is null
    ] = None,
) -> ClientHeaders:
    return ClientHeaders(x_ostinato_session, x_ostinato_store)


Headers = Annotated[ClientHeaders, Depends(_headers_of)]


def build_app(context: GatewayContext) -> FastAPI:
    """The application over `context`. It keeps its state in `app.state.gateway`."""
    gateway = Gateway(context)
    refusals: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorAnswer}}
    faults: dict[int | str, dict[str, Any]] = {"5XX": {"model": ErrorAnswer}}
    app = FastAPI(title="Ostinato gateway", docs_url="/docs", responses=refusals | faults)
    app.state.gateway = gateway

    _answer_errors(app)
    app.add_middleware(
        RequestLimits,
        admit=gateway.authenticate,
        temporary_archive=context.uploads.temporary_archive,
    )
    app.add_middleware(AnthropicErrors)
    app.add_middleware(CountRequests, metrics=gateway.metrics, clock=context.clock)
    _add_openai_routes(app, gateway)
    _add_anthropic_routes(app, gateway)
    _add_agent_routes(app, gateway)
    _add_upload_routes(app, context.uploads)
    _add_own_routes(app, gateway)
    return app


def _add_openai_routes(app: FastAPI, gateway: Gateway) -> None:
    config = gateway.context.config
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
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{model_id:path}")
    async def retrieve_model(model_id: str, tenant: Tenant) -> dict[str, Any]:
        check_model(model_id, config.model_name)
        return model

    @app.post("/v1/chat/completions", response_model=None)
    async def complete_chat(
        request: ChatRequest,
        tenant: Spender,
        headers: Headers,
    ) -> Response:
        answering = await gateway.chat.begin(headers.applied(request), tenant, headers.session)
        created = int(gateway.context.wall_clock())
        writer = CompletionWriter(request, answering.interaction_id, config.model_name, created)
        return await _answer(gateway, answering, writer)

    @app.post(RESPONSES_PATH, response_model=None)
    async def create_response(
        request: ResponsesRequest,
        tenant: Spender,
        headers: Headers,
    ) -> Response:
        asked = headers.applied(chat_of_response(request, config.model_name))
        answering = await gateway.chat.begin(asked, tenant, headers.session)
        created = int(gateway.context.wall_clock())
        writer = ResponseWriter(request, answering.interaction_id, created)
        return await _answer(gateway, answering, writer)


def _add_anthropic_routes(app: FastAPI, gateway: Gateway) -> None:
    model = gateway.context.config.model_name
    errors: dict[int | str, dict[str, Any]] = {
        status: {"model": AnthropicErrorAnswer} for status in ("4XX", "5XX")
    }

    @app.post(MESSAGES_PATH, response_model=None, responses=errors)
    async def create_message(
        request: MessagesRequest,
        tenant: Spender,
        headers: Headers,
    ) -> Response:
        asked = headers.applied(chat_request(request, model))
        answering = await gateway.chat.begin(asked, tenant, headers.session)
        writer = MessageWriter(answering.interaction_id, model, answering.prompt_tokens)
        return await _answer(gateway, answering, writer)

    @app.post(f"{MESSAGES_PATH}/count_tokens", responses=errors)
    async def count_tokens(request: CountRequest, tenant: Tenant) -> TokenCount:
        asked = chat_request(request, model)
        return TokenCount(input_tokens=await gateway.chat.count_tokens(asked))


def _add_agent_routes(app: FastAPI, gateway: Gateway) -> None:
    @app.post("/v1/agent/sessions")
    async def open_session(
        request: AgentSessionRequest,
        tenant: Spender,
        headers: Headers,
        idempotency_key: Annotated[str | None, Header(max_length=200)] = None,
    ) -> AgentAnswer:
        return await gateway.agents.open(headers.applied(request), tenant, idempotency_key)

    @app.post("/v1/agent/sessions/{session_id}/messages")
    async def follow_up(
        session_id: str,
        request: AgentMessageRequest,
        tenant: Spender,
        idempotency_key: Annotated[str | None, Header(max_length=200)] = None,
    ) -> AgentAnswer:
        return await gateway.agents.follow_up(session_id, request, tenant, idempotency_key)

    @app.delete("/v1/agent/sessions/{session_id}", status_code=204)
    async def close_session(session_id: str, tenant: Tenant) -> None:
        gateway.agents.close(session_id, tenant)


def _add_upload_routes(app: FastAPI, uploads: Uploads) -> None:
    def describe(tenant: Caller, upload: Upload) -> RepositoryAnswer:
        return RepositoryAnswer(
            id=upload.upload_id,
            bytes=upload.disk_bytes,
            files=upload.num_files,
            created_at=int(upload.created_at),
            expires_at=int(uploads.store.expires_at(tenant.name, upload.upload_id)),
            package_paths=list(upload.package_paths),
            test_paths=list(upload.test_paths),
        )

    @app.post(UPLOADS_PATH, openapi_extra=ARCHIVE_BODY)
    async def send_repository(request: Request, tenant: Tenant) -> RepositoryAnswer:
        return describe(tenant, await uploads.keep(tenant.name, request.state.archive))

    @app.get(UPLOADS_PATH)
    async def list_repositories(tenant: Tenant) -> RepositoryList:
        found = uploads.store.list(tenant.name)
        return RepositoryList(data=[describe(tenant, upload) for upload in found])

    @app.delete(UPLOADS_PATH + "/{repository_id}", status_code=204)
    async def delete_repository(repository_id: str, tenant: Tenant) -> None:
        await uploads.remove(tenant.name, repository_id)


def _add_own_routes(app: FastAPI, gateway: Gateway) -> None:
    @app.post("/v1/feedback")
    async def give_feedback(request: FeedbackRequest, tenant: Tenant) -> FeedbackAnswer:
        if request.interaction_id.startswith(PRIVATE_PREFIX):
            counters = gateway.recorder.counters[tenant.name]
            counters[f"feedback.without_consent.{request.signal.value}"] += 1
            return FeedbackAnswer(stored=False, feedback_id="")
        kept = await gateway.recorder.keep_feedback(
            request.interaction_id, tenant.name, request.signal, request.value, request.feedback_id
        )
        if kept is None:
            raise ApiError(
                404,
                f"interaction_id is {request.interaction_id!r}, wanted one of an answer to this "
                "tenant",
                code="unknown_interaction",
                param="interaction_id",
            )
        return FeedbackAnswer(stored=True, feedback_id=kept)

    @app.get("/healthz")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/v1/status")
    async def status(tenant: Tenant) -> dict[str, Any]:
        return gateway.status(tenant)

    @app.get("/metrics", response_model=None)
    async def metrics(tenant: Tenant) -> Response:
        if not tenant.operator:
            raise ApiError(
                403,
                f"{tenant.account} may not read the numbers of all tenants; wanted a key issued "
                "with --operator",
                code="permission_denied",
            )
        return Response(gateway.metrics.text(), media_type=METRICS_TYPE)


async def _answer(gateway: Gateway, answering: Answering, writer: AnswerWriter) -> Response:
    """The answer as events or whole, as the request wants it, in its API's format."""
    headers = {"x-ostinato-interaction": answering.interaction_id}
    if answering.request.stream:
        answer = _until_fault(gateway, answering, writer)
        events = with_pings(answer, writer.ping, gateway.context.config.ping_seconds)
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)
    finished = await gateway.chat.answer(answering)
    return JSONResponse(writer.whole(finished), headers=headers)


async def _until_fault(
    gateway: Gateway, answering: Answering, writer: AnswerWriter
) -> AsyncGenerator[str, None]:
    """Events of one answer. A failure is one too: the status is sent."""
    try:
        async with aclosing(gateway.chat.stream(answering)) as pieces:
            async for event in writer.events(pieces):
                yield event
    except OstinatoError as error:
        logger.error("interaction=%s stream_failed=%s", answering.interaction_id, error)
        yield writer.fault(error)


def _http_message(error: HTTPException) -> str:
    """Message for a refusal by FastAPI or Starlette."""
    if error.status_code == 400:  # a number of thousands of digits, above all
        return "body is no JSON that can be read, wanted an object"
    return str(error.detail)


def _answer_errors(app: FastAPI) -> None:
    """Every failure leaves in OpenAI's error format."""

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
        body = error_body("a fault of this server; its log names it", code="internal_error")
        if is_anthropic(request.url.path):  # this handler is outside of all middleware
            body = error_answer(500, body)
        return JSONResponse(body, status_code=500)
