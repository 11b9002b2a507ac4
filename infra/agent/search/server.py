"""The search service as a process of its own on a node, behind a unix socket.

One JSON object per line, each way: a request names a repository (with the directory to index it
from), a session, what changed in its sandbox, a query. An error answers its request and ends
nothing. It ranks nothing itself.

    python -m ostinato.infra.agent.search.server SOCKET [ENCODER_DIRECTORY]
"""

import asyncio
import base64
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ostinato.infra.agent.search.bm25 import Hit
from ostinato.infra.agent.search.service import Files, SearchService
from ostinato.infra.platform.errors import ConfigError, OstinatoError, StorageError

LONGEST_LINE_BYTES = 64 << 20
ReadFiles = Callable[[Path], Mapping[str, bytes]]


def read_directory(directory: Path) -> dict[str, bytes]:
    """Every regular file below a directory by relative path."""
    if not directory.is_dir():
        raise ConfigError(f"repository directory {directory} does not exist, wanted a directory")
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


async def serve(socket_path: Path, service: SearchService, stop: asyncio.Event) -> None:
    """Answers until `stop` is set. The socket exists only while it listens."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while line := await reader.readline():
                writer.write(json.dumps(answer(service, line)).encode() + b"\n")
                await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(handle, socket_path, limit=LONGEST_LINE_BYTES)
    async with server:
        await stop.wait()
    socket_path.unlink(missing_ok=True)


def answer(service: SearchService, line: bytes) -> dict[str, Any]:
    """One request's answer: {"hits": [...]}, {"ok": true} or {"error": why}."""
    try:
        request = json.loads(line)
        match request["do"]:
            case "search":
                _ensure_repository(service, request)
                hits = service.search(
                    request["session"],
                    request["repository"],
                    _decoded(request["changes"]),
                    request["query"],
                    request["limit"],
                )
                return {"hits": [asdict(hit) for hit in hits]}
            case "close":
                service.close_session(request["session"])
                return {"ok": True}
            case other:
                return {"error": f"request do={other!r}, wanted search or close"}
    except (OstinatoError, ValueError, KeyError, TypeError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _ensure_repository(service: SearchService, request: dict[str, Any]) -> None:
    if not service.knows(request["repository"]):
        service.add_repository(request["repository"], read_directory(Path(request["directory"])))


class RemoteSearch:
    """One sandbox's view of the node's service. See CodeSearch. Connects at the first search."""

    def __init__(
        self, socket_path: Path, repository_id: str, directory: Path, session_id: str
    ) -> None:
        self._socket_path = socket_path
        self._request = {
            "repository": repository_id,
            "directory": str(directory),
            "session": session_id,
        }
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._turn = asyncio.Lock()

    async def search(self, changes: Files, query: str, limit: int) -> list[Hit]:
        """Hits in the sandbox's present files. StorageError when the service cannot answer."""
        said = {"do": "search", "changes": _encoded(changes), "query": query, "limit": limit}
        answered = await self._ask({**self._request, **said})
        return [Hit(**hit) for hit in answered["hits"]]

    async def close(self) -> None:
        """Lets the service forget the session."""
        if self._streams is not None:
            await self._ask({**self._request, "do": "close"})
            self._streams[1].close()
            self._streams = None

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        async with self._turn:
            try:
                if self._streams is None:
                    self._streams = await asyncio.open_unix_connection(
                        self._socket_path, limit=LONGEST_LINE_BYTES
                    )
                reader, writer = self._streams
                writer.write(json.dumps(request).encode() + b"\n")
                await writer.drain()
                line = await reader.readline()
            except OSError as error:
                raise StorageError(f"search service {self._socket_path}: {error}") from error
        if not line:
            raise StorageError(f"search service {self._socket_path} closed the connection")
        answered = json.loads(line)
        if "error" in answered:
            raise StorageError(f"search service {self._socket_path}: {answered['error']}")
        return answered


def _encoded(changes: Files) -> dict[str, str | None]:
    return {
        path: None if content is None else base64.b64encode(content).decode()
        for path, content in changes.items()
    }


def _decoded(changes: Mapping[str, str | None]) -> dict[str, bytes | None]:
    return {
        path: None if content is None else base64.b64decode(content)
        for path, content in changes.items()
    }


def main(arguments: list[str]) -> None:
    """Serves until killed."""
    if len(arguments) not in (1, 2):
        raise ConfigError(f"arguments {arguments}, wanted SOCKET [ENCODER_DIRECTORY]")
    service = SearchService.load(Path(arguments[1]) if len(arguments) == 2 else None)
    asyncio.run(serve(Path(arguments[0]), service, asyncio.Event()))


if __name__ == "__main__":
    main(sys.argv[1:])
