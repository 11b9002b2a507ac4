"""Limits of a request before anything of it is parsed: who asks, size, time to arrive, bytes.

`RequestLimits` is ASGI middleware. It lets a request in by its head, and hands the application a
body that has arrived whole.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ostinato.infra.platform.errors import OstinatoError
from ostinato.infra.serving.gateway.bodies import PIECE_BYTES, scan_pieces
from ostinato.infra.serving.gateway.config import Caller
from ostinato.infra.serving.gateway.failures import ApiError, fault_answer, refusal_answer
from ostinato.infra.serving.gateway.uploads.archive import MAX_ARCHIVE_BYTES
from ostinato.infra.serving.gateway.uploads.receiving import UPLOADS_PATH, receive_archive

MAX_BODY_BYTES = 4 << 20
MAX_KEYLESS_BODY_BYTES = 64 << 10
BODY_SECONDS = 10.0
# all else, unknown paths too, wants a key
OPEN_PATHS = frozenset(
    {"/healthz", "/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc"},
)
_DISCARD_SECONDS = 2.0  # that a refused client may go on sending
_DISCARD_PAUSE_SECONDS = 0.005  # between two reads, so that a fast sender costs little CPU

logger = logging.getLogger(__name__)


class RequestLimits:
    """Middleware that refuses requests by their head, then by their raw bytes."""

    def __init__(
        self,
        app: ASGIApp,
        admit: Callable[[str | None], Caller],
        spooled: Callable[[str], AbstractContextManager[Path]],
        body_seconds: float = BODY_SECONDS,
    ) -> None:
        """`admit` gives the caller of an Authorization header, counted against its rate. `spooled`: a file
        for an archive of a tenant.
        """
        self._app, self._admit, self._spooled = app, admit, spooled
        self._body_seconds = body_seconds
        self._turn = asyncio.Lock()  # shared by all long bodies: one piece per turn of the loop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a refusal itself, otherwise passes the request on with its caller."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        most_bytes = MAX_KEYLESS_BODY_BYTES
        if scope["path"] not in OPEN_PATHS:
            try:
                # as OpenAI's clients send a key, or as Anthropic's do
                key = headers.get("x-api-key")
                caller = self._admit(headers.get("authorization") or (key and f"Bearer {key}"))
            except (ApiError, OstinatoError) as refusal:
                await _refuse_unread(refusal, scope, receive, send)
                return
            scope.setdefault("state", {})["caller"] = caller
            most_bytes = MAX_BODY_BYTES
            if scope["path"] == UPLOADS_PATH and scope["method"] == "POST":
                await self._pass_archive(caller.name, scope, receive, send)
                return
        try:
            body = await self._read(headers, receive, most_bytes)
            if body is None:
                return
            await self._scan(body)
        except ApiError as refusal:
            # what is left of the body stays unread, so the connection cannot be used again
            answer = refusal_answer(refusal, {"connection": "close"})
            await answer(scope, receive, send)
            return
        await self._app(scope, _given_first(body, receive), send)

    async def _pass_archive(self, tenant: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Receives an archive into a file, and passes the request on without its body."""
        try:
            with self._spooled(tenant) as path:
                if not await receive_archive(Headers(scope=scope), receive, path):
                    return
                scope["state"]["archive"] = path
                await self._app(scope, _given_first(b"", receive), send)
        except (ApiError, OstinatoError) as refusal:
            await _refuse_unread(refusal, scope, receive, send)

    async def _read(self, headers: Headers, receive: Receive, most_bytes: int) -> bytes | None:
        """The whole body. None when the client left."""
        declared = headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > most_bytes:
            raise _too_large(int(declared), most_bytes)
        parts: list[bytes] = []
        num_bytes = 0
        try:
            async with asyncio.timeout(self._body_seconds):
                while True:
                    message: dict[str, Any] = dict(await receive())
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    num_bytes += len(parts[-1])
                    if num_bytes > most_bytes:
                        raise _too_large(num_bytes, most_bytes)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError as error:
            raise ApiError(
                408,
                f"{num_bytes} bytes of the body came in {self._body_seconds:g} s, wanted all of it",
                code="request_timeout",
            ) from error

    async def _scan(self, body: bytes) -> None:
        """ApiError for an unsound body. Other requests run between two pieces of a long one."""
        pieces = scan_pieces(body)
        if len(body) <= PIECE_BYTES:
            next(pieces)
            return
        is_left = True
        while is_left:
            async with self._turn:
                is_left = next(pieces, "end") is None
                await asyncio.sleep(0)


def _given_first(body: bytes, receive: Receive) -> Receive:
    is_given = False

    async def give_body_first() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return give_body_first


async def _refuse_unread(
    refusal: ApiError | OstinatoError, scope: Scope, receive: Receive, send: Send
) -> None:
    """Answers at once, then drops what still comes of the body for a while: a connection closed
    before would take the answer from a client that is still sending.
    """
    if isinstance(refusal, OstinatoError):
        logger.error("path=%r failed=%s", scope["path"], refusal)
    headers = Headers(scope=scope)
    has_body = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
    more = {"connection": "close"} if has_body else {}
    answer = (
        refusal_answer(refusal, more)
        if isinstance(refusal, ApiError)
        else fault_answer(refusal, more)
    )
    if not has_body:
        await answer(scope, receive, send)
        return

    async def send_unended(message: Message) -> None:
        is_body = message["type"] == "http.response.body"
        await send({**message, "more_body": True} if is_body else message)

    await answer(scope, receive, send_unended)
    with suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_SECONDS):
            await _discard(receive)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _discard(receive: Receive) -> None:
    """Reads to the end of a body, at most MAX_ARCHIVE_BYTES."""
    num_bytes = 0
    while num_bytes <= MAX_ARCHIVE_BYTES:
        message = await receive()
        if not message.get("more_body", False):
            return
        num_bytes += len(message.get("body", b""))
        await asyncio.sleep(_DISCARD_PAUSE_SECONDS)


def _too_large(num_bytes: int, most_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"body has {num_bytes} bytes or more, wanted at most {most_bytes}",
        code="request_too_large",
    )
