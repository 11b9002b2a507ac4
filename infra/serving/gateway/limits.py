"""Limits of a request before anything of it is parsed: size, time to arrive, encoding, nesting.

`RequestLimits` is ASGI middleware. It hands the application a body that has arrived whole.
"""

import asyncio
import re
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ostinato.infra.serving.gateway.failures import ApiError

MAX_BODY_BYTES = 4 << 20
MAX_NESTING = 32
MAX_BRACKETS = 40_000  # arrays and objects, opened and closed
BODY_SECONDS = 10.0
_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
# everything up to an escape of half a surrogate pair, which is no text in any encoding
_HALF_PAIR = re.compile(
    rb"(?:[^\\]++|\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\(?!u[dD][89a-fA-F]).)*+\\u", re.DOTALL
)
_NO_BRACKETS = bytes(code for code in range(256) if code not in b"[]{}")


class RequestLimits:
    """Middleware that refuses requests by their raw bytes."""

    def __init__(self, app: ASGIApp, body_seconds: float = BODY_SECONDS) -> None:
        self._app = app
        self._body_seconds = body_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a refusal itself, otherwise passes the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(scope, receive)
            if body is None:
                return
            await asyncio.to_thread(check_body, body)
        except ApiError as refusal:
            # what is left of the body stays unread, so the connection cannot be used again
            headers = {"connection": "close"}
            answer = JSONResponse(refusal.detail, status_code=refusal.status_code, headers=headers)
            await answer(scope, receive, send)
            return
        is_given = False

        async def give_body_first() -> Message:
            nonlocal is_given
            if is_given:
                return await receive()
            is_given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, give_body_first, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body. None when the client left."""
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > MAX_BODY_BYTES:
            raise _too_large(int(declared))
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
                    if num_bytes > MAX_BODY_BYTES:
                        raise _too_large(num_bytes)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError as error:
            raise ApiError(
                408,
                f"{num_bytes} bytes of the body came in {self._body_seconds:g} s, wanted all of it",
                code="request_timeout",
            ) from error


def check_body(body: bytes) -> None:
    """ApiError for what is no UTF-8 text, is nested too deeply or holds too many arrays and objects."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise ApiError(400, f"body is no UTF-8: {error.reason} at byte {error.start}") from error
    if b"\0" in body or _HALF_PAIR.match(body):
        raise ApiError(400, "body holds a zero byte or half a surrogate pair, wanted UTF-8 text")
    brackets = _TEXT.sub(b"", body).translate(None, _NO_BRACKETS)
    if len(brackets) > MAX_BRACKETS:
        raise ApiError(
            400,
            f"body holds {len(brackets) // 2} arrays and objects, wanted at most "
            f"{MAX_BRACKETS // 2}",
        )
    depth = 0
    for bracket in brackets:
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_NESTING:
            raise ApiError(400, f"body is nested deeper than {MAX_NESTING}, wanted less")


def _too_large(num_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"body has {num_bytes} bytes or more, wanted at most {MAX_BODY_BYTES}",
        code="request_too_large",
    )
