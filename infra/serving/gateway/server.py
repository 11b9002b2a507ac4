"""HTTP server of the gateway: an application on a port.

The socket is bound before the server reports that it is up, so a busy port gives one clear error.
"""

import asyncio
import errno
import json
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import h11
import uvicorn
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.serving.gateway.failures import ApiError, error_body, refusal_answer

# from a connection's opening, or a later request's first byte, to the end of the request's head
HEAD_SECONDS = 10.0
ACCEPTED_AT_ONCE = 16  # new connections, before the open ones are served again
OPEN_FILES = 65_536
WAITING_CONNECTIONS = 4096  # queued by the kernel until they are accepted


def bind(host: str, port: int, setting: str = "OSTINATO_GATEWAY_PORT") -> socket.socket:
    """A bound socket. Port 0 means any free port. ConfigError, which names the setting, when the address cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            why = f"already in use; stop its program or set {setting} to a free port"
        else:
            why = f"not available: {error.strerror or error}"
        raise ConfigError(f"address {host} port {port} is {why}") from error
    return listener


@asynccontextmanager
async def running_server(
    app: ASGIApp, host: str, port: int, head_seconds: float = HEAD_SECONDS
) -> AsyncIterator[str]:
    """Serves for the length of the block. Yields the base URL once the server answers requests."""
    listener = bind(host, port)
    async with running_on(app, listener, head_seconds):
        bound_host, bound_port = listener.getsockname()[:2]
        yield f"http://{f'[{bound_host}]' if ':' in bound_host else bound_host}:{bound_port}"


@asynccontextmanager
async def running_on(
    app: ASGIApp, listener: socket.socket, head_seconds: float = HEAD_SECONDS
) -> AsyncIterator[None]:
    """Serves on a bound socket for the length of the block, then closes it."""
    server = _QuietServer(_configure(app, head_seconds))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started:
            if task.done():
                await task
                raise ConfigError(f"server on {listener.getsockname()} ended while starting")
            await asyncio.sleep(0.01)
        yield
    finally:
        server.should_exit = True
        with suppress(asyncio.CancelledError):
            await task
        listener.close()


async def serve(app: ASGIApp, host: str, port: int) -> None:
    """Serves until cancelled or interrupted."""
    listener = bind(host, port)
    try:
        await _Server(_configure(app, HEAD_SECONDS)).serve(sockets=[listener])
    finally:
        listener.close()


def _configure(app: ASGIApp, head_seconds: float) -> uvicorn.Config:
    protocol = type("Timed", (_TimedProtocol,), {"head_seconds": head_seconds})
    return uvicorn.Config(
        HeaderValidationMiddleware(app),
        log_level="warning",
        timeout_graceful_shutdown=5,
        http=protocol,
        ws="none",
        backlog=ACCEPTED_AT_ONCE,  # asyncio accepts this many at a time
    )


def raise_open_files() -> None:
    """Raises this process's limit of open files: each connection is one, and shells start at 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class HeaderValidationMiddleware:
    """Middleware against request smuggling. It refuses heads that a proxy in front may read differently:
    the proxy would then take part of a body for the next request.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuses such a request, and passes every other one on."""
        if scope["type"] == "http" and (refusal := _find_fault(scope)) is not None:
            await refusal_answer(refusal, {"connection": "close"})(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _find_fault(scope: Scope) -> ApiError | None:
    if scope["http_version"] not in ("1.0", "1.1"):
        return ApiError(505, f"HTTP version is {scope['http_version']}, wanted 1.1")
    if {"content-length", "transfer-encoding"} <= set(Headers(scope=scope)):
        return ApiError(400, "content-length and transfer-encoding are both given, wanted one")
    return None


class _TimedProtocol(H11Protocol):
    """HTTP/1.1 connection that is closed when the head of a request does not come in time."""

    head_seconds = HEAD_SECONDS
    _head_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._time_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timing()

    def send_400_response(self, msg: str) -> None:
        """Answers bytes that are not HTTP, unless an answer has begun, and closes the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(error_body(msg, code="bad_request")).encode()
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            head = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _time_head(self) -> None:
        """Starts the time limit of a head once, however slowly its bytes come; stops it at the head's end."""
        if self.conn.their_state is not h11.IDLE:
            self._stop_timing()
        elif self._head_due is None:
            self._head_due = self.loop.call_later(self.head_seconds, self._close_if_idle)

    def _close_if_idle(self) -> None:
        self._head_due = None
        if self.conn.their_state is h11.IDLE:
            self.transport.close()

    def _stop_timing(self) -> None:
        if self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None


class _Server(uvicorn.Server):
    """uvicorn server that accepts few connections at a time and lets many wait."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Raises the limit of open files, and the queue of waiting connections above `backlog`."""
        raise_open_files()
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(WAITING_CONNECTIONS)


class _QuietServer(_Server):
    """Server that leaves the process's signal handlers alone: `running_on` stops it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
