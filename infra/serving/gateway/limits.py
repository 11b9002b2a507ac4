"""Checks of a request before it is parsed: its caller, size, time to arrive, and bytes.

`RequestLimits` is ASGI middleware. It admits a request by its headers, and passes it on when the
body has arrived: an archive in a file, any other body in memory after one linear pass over it.
"""

import asyncio
import codecs
import io
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ostinato.infra.platform.errors import OstinatoError, StorageError
from ostinato.infra.serving.gateway.config import Caller
from ostinato.infra.serving.gateway.failures import ApiError, fault_answer, refusal_answer
from ostinato.infra.serving.gateway.uploads.archive import MAX_ARCHIVE_BYTES

logger = logging.getLogger(__name__)

UPLOADS_PATH = "/v1/repositories"
ARCHIVE_SECONDS = 120.0
ARCHIVE_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}
"""OpenAPI's description of the body."""
MAX_BODY_BYTES = 4 << 20
MAX_KEYLESS_BODY_BYTES = 64 << 10
BODY_SECONDS = 10.0
# every other path needs a key, unknown paths too
OPEN_PATHS = frozenset(
    {"/healthz", "/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc"},
)
_DISCARD_SECONDS = 2.0  # time for which a refused client may go on sending
_DISCARD_PAUSE_SECONDS = 0.005  # between two reads, so that a fast sender costs little CPU
PIECE_BYTES = 64 << 10
MAX_NESTING = 32
MAX_BRACKETS = 40_000  # two for each array or object
MAX_COMMAS = 20_000  # bounds the values, since each wrong value would need an error message
_OPEN, _CLOSE, _COMMA = 1, -1, 2
_ESCAPE_BYTES, _UNICODE_ESCAPE_BYTES = 4, 6  # of \udX, which identifies half a pair, and of \uXXXX
_HIGH, _LOW = 1, 2


def _table(marks: dict[bytes, int]) -> NDArray[np.int8]:
    """The mark of each of the 256 byte values."""
    table = np.zeros(256, dtype=np.int8)
    for codes, mark in marks.items():
        table[list(codes)] = mark
    return table


_MARKS = _table({b"[{": _OPEN, b"]}": _CLOSE, b",": _COMMA})
_HALVES = _table({b"89abAB": _HIGH, b"cdefCDEF": _LOW})  # the digit after \ud
_NONE = np.zeros(0, dtype=np.int64)


class BodyScan:
    """One pass over a body that is fed in pieces."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._num_bytes = 0
        self._rest = b""  # an escape cut by the end of a piece
        self._rest_at = 0
        self._is_in_string = False
        self._depth = self._num_brackets = self._num_commas = 0
        self._wanted_lows = _NONE  # offsets at which the second half of a pair must follow

    def feed(self, piece: bytes, *, is_last: bool) -> None:
        """Checks the next piece. ApiError when it is not UTF-8, too deeply nested or holds too many values."""
        self._check_text(piece, is_last=is_last)
        # without escaped backslashes, every backslash begins an escape
        text = (self._rest + piece).replace(b"\\\\", b"  ")
        end = -1 if is_last else text.find(b"\\", max(0, len(text) - _ESCAPE_BYTES + 1))
        end = len(text) if end < 0 else end
        if b"\\u" in text or len(self._wanted_lows):
            self._check_pairs(np.frombuffer(text, dtype=np.uint8), end, is_last=is_last)
        self._check_structure(text[:end])
        self._rest, self._rest_at = text[end:], self._rest_at + end

    def _check_text(self, piece: bytes, *, is_last: bool) -> None:
        self._num_bytes += len(piece)
        try:
            self._decoder.decode(piece, is_last)
        except UnicodeDecodeError as error:
            start = self._num_bytes - len(error.object) + error.start
            raise ApiError(400, f"body is not UTF-8: {error.reason} at byte {start}") from error
        if b"\0" in piece:
            raise _not_text()

    def _check_pairs(self, codes: NDArray[np.uint8], end: int, *, is_last: bool) -> None:
        """ApiError for half a surrogate pair without its other half."""
        at = np.flatnonzero(codes[: max(0, len(codes) - _ESCAPE_BYTES + 1)] == ord("\\"))
        is_surrogate = (codes[at + 1] == ord("u")) & (codes[at + 2] | 32 == ord("d"))
        at = at[is_surrogate]
        halves = _HALVES[codes[at + 3]]
        lows = self._rest_at + at[halves == _LOW]
        follow_highs = self._rest_at + at[halves == _HIGH] + _UNICODE_ESCAPE_BYTES
        wanted = np.concatenate([self._wanted_lows, follow_highs])
        is_here = wanted < self._rest_at + end
        self._wanted_lows = wanted[~is_here]
        if not np.array_equal(wanted[is_here], lows) or (is_last and len(self._wanted_lows)):
            raise _not_text()

    def _check_structure(self, text: bytes) -> None:
        codes = np.frombuffer(text.replace(b'\\"', b"  "), dtype=np.uint8)
        if not len(codes):
            return
        # a byte after an odd number of quotes is in a string
        is_in_string = np.bitwise_xor.accumulate(codes == ord('"')) ^ self._is_in_string
        self._is_in_string = bool(is_in_string[-1])
        marks = _MARKS[codes]
        marks = marks[(marks != 0) & ~is_in_string]
        is_comma = marks == _COMMA
        self._num_commas += int(np.count_nonzero(is_comma))
        if self._num_commas > MAX_COMMAS:
            raise ApiError(400, f"body holds more than {MAX_COMMAS} values, wanted fewer")
        brackets = marks[~is_comma]
        self._num_brackets += len(brackets)
        if self._num_brackets > MAX_BRACKETS:
            raise ApiError(
                400, f"body holds more than {MAX_BRACKETS // 2} arrays and objects, wanted fewer"
            )
        if len(brackets):
            depths = self._depth + np.cumsum(brackets, dtype=np.int64)
            self._depth = int(depths[-1])
            if depths.max() > MAX_NESTING:
                raise ApiError(400, f"body is nested deeper than {MAX_NESTING}, wanted less")


def scan_pieces(body: bytes, piece_bytes: int = PIECE_BYTES) -> Iterator[None]:
    """Scans a body, one piece for each step of the iterator. ApiError at the first fault."""
    scan = BodyScan()
    for start in range(0, max(len(body), 1), piece_bytes):
        end = start + piece_bytes
        scan.feed(body[start:end], is_last=end >= len(body))
        yield


def _not_text() -> ApiError:
    return ApiError(400, "body holds a zero byte or half a surrogate pair, wanted UTF-8 text")


async def receive_archive(
    headers: Headers, receive: Receive, path: Path, seconds: float = ARCHIVE_SECONDS
) -> bool:
    """Writes a request's body into the file `path`; returns and raises as `_receive` does."""
    try:
        with path.open("wb") as file:
            return await _receive(headers, receive, file, "archive", MAX_ARCHIVE_BYTES, seconds)
    except OSError as error:
        raise StorageError(f"the incoming archive cannot be written: {error}") from error


async def _receive(
    headers: Headers, receive: Receive, file: IO[bytes], noun: str, most_bytes: int, seconds: float
) -> bool:
    """Writes a body into `file`. False when the client disconnected. ApiError when the body is too slow or
    too large; a declared length that is too large is refused at once.
    """

    def check(num_bytes: int) -> None:
        if num_bytes > most_bytes:
            code = "archive_too_large" if noun == "archive" else "request_too_large"
            message = f"{noun} has {num_bytes} bytes or more, wanted at most {most_bytes}"
            raise ApiError(413, message, code=code)

    declared = headers.get("content-length", "0")
    check(int(declared) if declared.isdecimal() else 0)
    num_bytes = 0
    try:
        async with asyncio.timeout(seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return False
                num_bytes += file.write(message.get("body", b""))
                check(num_bytes)
                if not message.get("more_body", False):
                    return True
    except TimeoutError as error:
        raise ApiError(
            408,
            f"{num_bytes} bytes of the {noun} came in {seconds:g} s, wanted all of it",
            code="request_timeout",
        ) from error


class RequestLimits:
    """Middleware that checks the headers of a request, then its raw bytes."""

    def __init__(
        self,
        app: ASGIApp,
        admit: Callable[[str | None], Caller],
        temporary_archive: Callable[[str], AbstractContextManager[Path]],
        body_seconds: float = BODY_SECONDS,
    ) -> None:
        """`admit` returns the caller of an Authorization header and counts the request against its rate.
        `temporary_archive` opens a file for an archive of a tenant.
        """
        self._app, self._admit, self._temporary_archive = app, admit, temporary_archive
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
                key = headers.get("x-api-key")  # Anthropic's clients send the key here
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
            file = io.BytesIO()
            if not await _receive(headers, receive, file, "body", most_bytes, self._body_seconds):
                return
            body = file.getvalue()
            await self._scan(body)
        except ApiError as refusal:
            # the rest of the body stays unread, so the connection cannot be used again
            answer = refusal_answer(refusal, {"connection": "close"})
            await answer(scope, receive, send)
            return
        await self._app(scope, _replay_body(body, receive), send)

    async def _pass_archive(self, tenant: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Receives an archive into a file, and passes the request on without its body."""
        try:
            with self._temporary_archive(tenant) as path:
                if not await receive_archive(Headers(scope=scope), receive, path):
                    return
                scope["state"]["archive"] = path
                await self._app(scope, _replay_body(b"", receive), send)
        except (ApiError, OstinatoError) as refusal:
            await _refuse_unread(refusal, scope, receive, send)

    async def _scan(self, body: bytes) -> None:
        """ApiError for a malformed body. Other requests run between two pieces of a long body."""
        pieces = scan_pieces(body)
        if len(body) <= PIECE_BYTES:
            next(pieces)
            return
        is_left = True
        while is_left:
            async with self._turn:
                is_left = next(pieces, "end") is None
                await asyncio.sleep(0)


def _replay_body(body: bytes, receive: Receive) -> Receive:
    is_given = False

    async def receive_body_first() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_body_first


async def _refuse_unread(
    refusal: ApiError | OstinatoError, scope: Scope, receive: Receive, send: Send
) -> None:
    """Answers at once, then discards the rest of the body for a while: if the connection closed
    earlier, a client that is still sending would lose the answer.
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
