"""Receives an archive into a file, piece by piece, within limits of size and time."""

import asyncio
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive

from ostinato.infra.platform.errors import StorageError
from ostinato.infra.serving.gateway.failures import ApiError
from ostinato.infra.serving.gateway.uploads.archive import MAX_ARCHIVE_BYTES

UPLOADS_PATH = "/v1/repositories"
ARCHIVE_SECONDS = 120.0
ARCHIVE_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}
"""OpenAPI's description of the body."""


async def receive_archive(
    headers: Headers, receive: Receive, path: Path, seconds: float = ARCHIVE_SECONDS
) -> bool:
    """Writes a request's body into a file. False when the client left. ApiError for a body that is too
    large, by its declared length at once, or too slow.
    """
    declared = headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > MAX_ARCHIVE_BYTES:
        raise _too_large(int(declared))
    num_bytes = 0
    try:
        with path.open("wb") as file:
            async with asyncio.timeout(seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return False
                    num_bytes += file.write(message.get("body", b""))
                    if num_bytes > MAX_ARCHIVE_BYTES:
                        raise _too_large(num_bytes)
                    if not message.get("more_body", False):
                        return True
    except TimeoutError as error:
        raise ApiError(
            408,
            f"{num_bytes} bytes of the archive came in {seconds:g} s, wanted all of it",
            code="request_timeout",
        ) from error
    except OSError as error:
        raise StorageError(f"archive on its way in: {error}") from error


def _too_large(num_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"archive has {num_bytes} bytes or more, wanted at most {MAX_ARCHIVE_BYTES}",
        code="archive_too_large",
    )
