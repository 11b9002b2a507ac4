"""The HTTP API as a FastAPI application.

`build_app` adds routes, authentication, rate limits and error answers. answers/ produces the
answers, and server.py listens.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from fastapi import FastAPI, Header, Request, Response

from ostinato.infra.serving.gateway.answers.agents import AgentService
from ostinato.infra.serving.gateway.answers.anthropic_messages import AnthropicErrors
from ostinato.infra.serving.gateway.answers.completions import ChatService, RecordedChats
from ostinato.infra.serving.gateway.budgets import Budgets
from ostinato.infra.serving.gateway.config import Caller, GatewayConfig
from ostinato.infra.serving.gateway.context import GatewayContext
from ostinato.infra.serving.gateway.failures import ApiError
from ostinato.infra.serving.gateway.limits import ARCHIVE_BODY, UPLOADS_PATH, RequestLimits
from ostinato.infra.serving.gateway.metrics import METRICS_TYPE, CountRequests, Metrics
from ostinato.infra.serving.gateway.recorder import PRIVATE_PREFIX, InteractionRecorder
from ostinato.infra.serving.gateway.routes import (
    Headers,
    Spender,
    Tenant,
    add_anthropic_routes,
    add_openai_routes,
    answer_errors,
)
from ostinato.infra.serving.gateway.schemas import (
    AgentAnswer,
    AgentMessageRequest,
    AgentSessionRequest,
    ErrorAnswer,
    FeedbackAnswer,
    FeedbackRequest,
    RepositoryAnswer,
    RepositoryList,
)
from ostinato.infra.serving.gateway.tenants import Spending, Tenants
from ostinato.infra.serving.gateway.uploads.store import Upload, Uploads

IdempotencyKey = Annotated[
    str | None,
    Header(
        max_length=200,
        description="name of the request: repeating the request waits for its first answer and returns that; a "
        "different request under the name is another interaction",
    ),
]


class Gateway:
    """Services that the routes of one application share."""

    def __init__(self, context: GatewayContext) -> None:
        self.context = context
        config = context.config
        budgets = Budgets(context.ledger.spending)
        self.tenants = Tenants(config.tenants, context.issued_keys, budgets)
        self.recorder = InteractionRecorder(
            config.line, context.ledger, context.objects, context.wall_clock, budgets.spend
        )
        chats = RecordedChats(context, self.recorder)
        self.chat = ChatService(config, context.arms, context.renderer, chats, context.clock)
        self.agents = AgentService(context, self.recorder)
        self.metrics = Metrics(self.recorder.counters, lambda: len(self.agents.sessions))
        self.started = context.clock()

    @property
    def config(self) -> GatewayConfig:
        return self.context.config

    def chat_of(self, caller: Caller) -> ChatService:
        """The chat service that all callers share. It separates them by name."""
        return self.chat

    def wall_clock(self) -> float:
        return self.context.wall_clock()

    def authenticate(self, authorization: str | None) -> Caller:
        """The caller of a bearer key. Counts the request against the caller's rate limit."""
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
                f"{tenant.account} sends more than {tenant.rate_limit.requests_per_minute:g} "
                "requests per minute",
                code="rate_limit_exceeded",
                retry_after_seconds=wait_seconds,
            )
        return tenant

    @contextmanager
    def spending(self, tenant: Caller) -> Iterator[Spending]:
        """The tokens of a request that lasts as long as the block. ApiError when the caller has none left."""
        counters = self.recorder.counters[tenant.name]
        spending = Spending(self.tenants, tenant, self.context.wall_clock, counters)
        spending.reserve(0)
        try:
            yield spending
        finally:
            spending.end()

    def status(self, tenant: Caller) -> dict[str, Any]:
        """Numbers of one tenant. They show nothing of other tenants, arms or checkpoints."""
        return {
            "uptime_seconds": self.context.clock() - self.started,
            "open_sessions": self.agents.count_sessions(tenant),
            "repositories": list(self.context.workplaces.names(tenant.name)),
            "tokens_left_today": self.tenants.tokens_left(tenant, self.context.wall_clock()),
            "counters": dict(sorted(self.recorder.counters[tenant.name].items())),
        }


def build_app(context: GatewayContext) -> FastAPI:
    """The application over `context`. It keeps its state in `app.state.gateway`."""
    gateway = Gateway(context)
    refusals: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorAnswer}}
    faults: dict[int | str, dict[str, Any]] = {"5XX": {"model": ErrorAnswer}}
    app = FastAPI(title="Ostinato gateway", docs_url="/docs", responses=refusals | faults)
    app.state.gateway = gateway

    answer_errors(app)
    app.add_middleware(
        RequestLimits,
        admit=gateway.authenticate,
        temporary_archive=context.uploads.temporary_archive,
    )
    app.add_middleware(AnthropicErrors)
    app.add_middleware(CountRequests, metrics=gateway.metrics, clock=context.clock)
    add_openai_routes(app, gateway)
    add_anthropic_routes(app, gateway)
    _add_agent_routes(app, gateway)
    _add_upload_routes(app, context.uploads)
    _add_feedback_and_status_routes(app, gateway)
    return app


def _add_agent_routes(app: FastAPI, gateway: Gateway) -> None:
    @app.post("/v1/agent/sessions")
    async def open_session(
        request: AgentSessionRequest,
        spending: Spender,
        headers: Headers,
        idempotency_key: IdempotencyKey = None,
    ) -> AgentAnswer:
        """Runs a whole attempt of the agent in a box of the gateway, in a new session."""
        return await gateway.agents.open(headers.applied(request), spending, idempotency_key)

    @app.post("/v1/agent/sessions/{session_id}/messages")
    async def follow_up(
        session_id: str,
        request: AgentMessageRequest,
        spending: Spender,
        headers: Headers,
        idempotency_key: IdempotencyKey = None,
    ) -> AgentAnswer:
        """Runs a follow-up attempt on the files that the session's agent left."""
        return await gateway.agents.follow_up(
            session_id, headers.applied(request), spending, idempotency_key
        )

    @app.delete("/v1/agent/sessions/{session_id}", status_code=204)
    async def close_session(session_id: str, tenant: Tenant) -> None:
        """Ends a session and forgets its files."""
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
        """Keeps a repository, sent as a .tar.gz or .zip archive, for agent sessions of the tenant."""
        return describe(tenant, await uploads.keep(tenant.name, request.state.archive))

    @app.get(UPLOADS_PATH)
    async def list_repositories(tenant: Tenant) -> RepositoryList:
        """Lists the repositories that the tenant has sent."""
        found = uploads.store.list(tenant.name)
        return RepositoryList(data=[describe(tenant, upload) for upload in found])

    @app.delete(UPLOADS_PATH + "/{repository_id}", status_code=204)
    async def delete_repository(repository_id: str, tenant: Tenant) -> None:
        """Removes a repository at once. A 409 while an agent works on it."""
        await uploads.remove(tenant.name, repository_id)


def _add_feedback_and_status_routes(app: FastAPI, gateway: Gateway) -> None:
    @app.post("/v1/feedback")
    async def give_feedback(request: FeedbackRequest, tenant: Tenant) -> FeedbackAnswer:
        """Stores what the user did with an answer."""
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
                f"interaction_id is {request.interaction_id!r}, wanted the id of a stored "
                "interaction of this tenant",
                code="unknown_interaction",
                param="interaction_id",
            )
        return FeedbackAnswer(stored=True, feedback_id=kept)

    @app.get("/healthz")
    async def health() -> dict[str, str]:
        """Answers while the server is alive. Needs no key."""
        return {"status": "ok"}

    @app.get("/v1/status")
    async def status(tenant: Tenant) -> dict[str, Any]:
        """Reports the calling tenant's own repositories, counters, open sessions and tokens left today."""
        return gateway.status(tenant)

    @app.get("/metrics", response_model=None)
    async def metrics(tenant: Tenant) -> Response:
        """Reports requests, latencies and the counters of all tenants for Prometheus. Needs an operator's key."""
        if not tenant.operator:
            raise ApiError(
                403,
                f"{tenant.account} may not read the numbers of all tenants; wanted a key issued "
                "with --operator",
                code="permission_denied",
            )
        return Response(gateway.metrics.text(), media_type=METRICS_TYPE)
