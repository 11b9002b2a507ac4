"""The server that programs in boxes reach: one socket, and one session with its own key per attempt.

The socket is a file mounted in every box (SandboxSpec.mounts); nothing listens on a network. A key is created
for one attempt and opens only that attempt's session, until the attempt ends.
"""

import asyncio
import json
import shutil
import socket
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import NoReturn

from fastapi import FastAPI
from pydantic import SecretStr
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ostinato.infra.agent.config import AgentRequest, HarnessConfig
from ostinato.infra.agent.harnesses import SERVED_MODEL
from ostinato.infra.serving.attempts.session import AttemptSession
from ostinato.infra.serving.gateway.answers.anthropic_messages import AnthropicErrors
from ostinato.infra.serving.gateway.config import Caller, GatewayConfig, TenantConfig
from ostinato.infra.serving.gateway.failures import ApiError
from ostinato.infra.serving.gateway.limits import RequestLimits
from ostinato.infra.serving.gateway.routes import (
    add_anthropic_routes,
    add_openai_routes,
    answer_errors,
)
from ostinato.infra.serving.gateway.server import running_on
from ostinato.infra.serving.gateway.tenants import Spending, Tenants
from ostinato.models.decode.protocol import ModelClient
from ostinato.models.rendering import Renderer

MAX_REQUESTS = 64  # of one attempt at the same time, whether or not their bodies have arrived
_MAX_REFUSAL_CHARACTERS = 300
_WAIT_SECONDS = 1.0  # after which a client may send a request beyond those again


class AttemptDoor:
    """The server of one process's attempts. Belongs to one event loop, on which it starts when first needed."""

    def __init__(self, model: ModelClient, renderer: Renderer, harness: HarnessConfig) -> None:
        self._model, self._renderer = model, renderer
        # the settings need a tenant, but only sessions call
        unused_tenant = TenantConfig(name="attempts", api_keys=(SecretStr("none"),))
        self.config = GatewayConfig(
            line="attempts", tenants=(unused_tenant,), model_name=SERVED_MODEL, harness=harness
        )
        self._folder = Path(tempfile.mkdtemp(prefix="ostinato-door-"))
        self.socket_path = self._folder / "door.sock"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.socket_path))
        self._listener.listen()
        self._running = AsyncExitStack()
        self._start: asyncio.Task[None] | None = None
        self._by_key: dict[str, AttemptSession] = {}
        self._by_name: dict[str, AttemptSession] = {}
        self._tenants = Tenants(())  # attempts have no budget per day
        self.app = self._build_app()

    @asynccontextmanager
    async def session(
        self, request: AgentRequest, clock: Callable[[], float]
    ) -> AsyncIterator[AttemptSession]:
        """A session that is open for the length of the block."""
        if self._start is None:
            self._start = asyncio.create_task(self._serve())
        await asyncio.shield(self._start)
        session = AttemptSession(self._model, self._renderer, request, self.config, clock)
        self._by_key[session.key] = self._by_name[session.caller.name] = session
        try:
            yield session
        finally:
            del self._by_key[session.key], self._by_name[session.caller.name]
            await session.close()

    async def close(self) -> None:
        """Stops the server and removes its socket."""
        await self._running.aclose()
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    # --- called by the routes

    def chat_of(self, caller: Caller) -> AttemptSession:
        session = self._by_name.get(caller.name)
        if session is None:
            raise ApiError(403, "the attempt is over", code="attempt_over")
        return session

    @contextmanager
    def spending(self, tenant: Caller) -> Iterator[Spending]:
        yield Spending(self._tenants, tenant, time.time, Counter())

    def wall_clock(self) -> float:
        return time.time()

    def authenticate(self, authorization: str | None) -> Caller:
        """The caller of the attempt that a key belongs to. Counts the request as open until `_ReportResponses` sees its
        end. ApiError beyond MAX_REQUESTS.
        """
        scheme, _, key = (authorization or "").partition(" ")
        session = self._by_key.get(key.strip()) if scheme.lower() == "bearer" else None
        if session is None:
            raise ApiError(
                401, "API key is missing, or its attempt is over", code="invalid_api_key"
            )
        if session.num_requests >= MAX_REQUESTS:
            raise ApiError(
                429,
                f"{session.num_requests} requests of this attempt are open, wanted fewer than {MAX_REQUESTS}; ask again "
                "when one has ended",
                code="rate_limit_exceeded",
                retry_after_seconds=_WAIT_SECONDS,
            )
        session.num_requests += 1
        return session.caller

    async def _serve(self) -> None:
        await self._running.enter_async_context(running_on(self.app, self._listener))

    def _build_app(self) -> FastAPI:
        app = FastAPI(title="Ostinato attempts", docs_url=None, redoc_url=None, openapi_url=None)
        app.state.gateway = self
        answer_errors(app)
        app.add_middleware(
            RequestLimits, admit=self.authenticate, temporary_archive=_refuse_archive
        )
        app.add_middleware(AnthropicErrors)
        app.add_middleware(_ReportResponses, sessions=self._by_name)
        add_openai_routes(app, self)
        add_anthropic_routes(app, self)
        return app


class _ReportResponses:
    """Middleware that reports each response, and the end of its request, to the session of the request."""

    def __init__(self, app: ASGIApp, sessions: dict[str, AttemptSession]) -> None:
        self._app, self._sessions = app, sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 200

        async def send_reported(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body" and status:
                if (session := self._session_of(scope)) is not None:
                    session.note_response(status, _read_refusal(message) if status >= 400 else "")
                status = 0  # reported once
            await send(message)

        try:
            await self._app(scope, receive, send_reported)
        finally:
            if (session := self._session_of(scope)) is not None:
                session.num_requests -= 1

    def _session_of(self, scope: Scope) -> AttemptSession | None:
        """The session of an admitted request. None after the session's end."""
        caller = scope.get("state", {}).get("caller")
        return None if caller is None else self._sessions.get(caller.name)


def _read_refusal(message: Message) -> str:
    """The message of an error in any API's format."""
    try:
        text = json.loads(message["body"])["error"]["message"]
    except (ValueError, KeyError, TypeError):
        text = message["body"].decode(errors="replace")
    return str(text)[:_MAX_REFUSAL_CHARACTERS]


def _refuse_archive(tenant: str) -> NoReturn:
    raise ApiError(404, "this server accepts no repositories", code="not_found")
