"""The HTTP server of rented sandboxes: E2B's control plane, and the calls to each sandbox, on one port."""

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from pydantic import Field, PositiveInt, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ostinato.infra.platform.errors import (
    CapacityExhausted,
    SandboxError,
    SandboxLost,
    SandboxNotFound,
)
from ostinato.infra.platform.record import Record
from ostinato.infra.serving.gateway.issued_keys import locked, write_private
from ostinato.infra.serving.gateway.server import bind, running_on
from ostinato.infra.serving.sandboxes.calls import SandboxCalls, read_body, read_json
from ostinato.infra.serving.sandboxes.guest import Refused
from ostinato.infra.serving.sandboxes.service import (
    RentedSandbox,
    SandboxService,
    SandboxServiceConfig,
)

KEY_FILE = "sandbox_key"
ENVD_VERSION = "0.6.1"  # by which the SDK decides what it may ask for
_MAX_BODY_BYTES = 1 << 20
_MAX_FORKS = 16
_SECONDS = 300  # until a sandbox ends, if its renter does not say
_Body = TypeVar("_Body", bound=Record)
_STATUS = {
    "invalid_argument": 400,
    "unauthenticated": 401,
    "not_found": 404,
    "already_exists": 409,
    "failed_precondition": 409,
    "resource_exhausted": 429,
    "internal": 500,
    "unimplemented": 501,
    "unavailable": 502,
    "no_space": 507,
}


class NewSandbox(Record):
    """Body of a request for a sandbox. Other fields of E2B's, such as network rules, are refused."""

    template: str = Field(default="base", alias="templateID")
    timeout: float = _SECONDS
    metadata: dict[str, str] = Field(default_factory=dict)
    variables: dict[str, str] = Field(default_factory=dict, alias="envVars")
    has_network: bool = Field(default=True, alias="allow_internet_access")
    pauses_at_end: bool = Field(default=False, alias="autoPause")


class ForkRequest(Record):
    """Body of a request for forks."""

    timeout: float = _SECONDS
    count: PositiveInt = Field(default=1, le=_MAX_FORKS)


class TimeRequest(Record):
    """Body of a request about the time limit of a sandbox. `memory`: of the processes, which are always kept."""

    timeout: float = _SECONDS
    memory: bool = True


class FileRequest(Record):
    """Body of a request to save a sandbox."""

    memory: bool = False


def read_key(home: Path) -> str:
    """The API key of this home's server, drawn when it is first needed."""
    path = home / KEY_FILE
    if not path.exists():
        home.mkdir(parents=True, exist_ok=True)
        with locked(path):
            if not path.exists():
                write_private(path, f"e2b_{secrets.token_hex(20)}".encode())
    return path.read_text().strip()


class ControlPlane:
    """Handlers of the routes that make, list, pause, fork and end sandboxes. Each asks for the API key."""

    def __init__(self, service: SandboxService, key: str) -> None:
        self._service = service
        self._key = key.encode()

    def routes(self) -> list[Route]:
        """The routes of both versions of the API."""
        one = "/sandboxes/{sandbox_id}"
        table: tuple[tuple[str, str, Callable[[Request], Awaitable[Response]]], ...] = (
            ("POST", "/sandboxes", self._create),
            ("GET", "/sandboxes", self._list),
            ("GET", one, self._show),
            ("DELETE", one, self._kill),
            ("POST", f"{one}/timeout", self._set_timeout),
            ("POST", f"{one}/pause", self._pause),
            ("POST", f"{one}/resume", self._resume),
            ("POST", f"{one}/connect", self._resume),
            ("POST", f"{one}/snapshots", self._save),
            ("POST", f"{one}/fork", self._fork),
            ("GET", "/snapshots", self._list_snapshots),
            ("DELETE", "/templates/{snapshot_id}", self._forget),
        )
        return [
            Route(version + path, self._guarded(handler), methods=[method])
            for version in ("", "/v2")
            for method, path, handler in table
        ]

    def _guarded(
        self, handler: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            given = request.headers.get("x-api-key", "").encode()
            if not secrets.compare_digest(given, self._key):
                raise Refused("unauthenticated", "header X-API-Key does not hold the server's key")
            return await handler(request)

        return answer

    def _named(self, request: Request) -> RentedSandbox:
        return self._service.find(request.path_params["sandbox_id"])

    async def _create(self, request: Request) -> Response:
        asked = await _read(request, NewSandbox)
        made = await self._service.create(
            asked.template,
            asked.timeout,
            metadata=asked.metadata,
            variables=asked.variables,
            has_network=asked.has_network,
            pauses_at_end=asked.pauses_at_end,
        )
        return JSONResponse(_opened(made), 201)

    async def _list(self, request: Request) -> Response:
        """All sandboxes on one page, the newest first."""
        wanted = request.query_params
        metadata = parse_qsl(wanted.get("metadata", ""))
        states = wanted.get("state", "running,paused").split(",")
        found = [
            self._described(sandbox)
            for sandbox in self._service.sandboxes.values()
            if _state(sandbox) in states
            and all(sandbox.metadata.get(name) == value for name, value in metadata)
        ]
        found.sort(key=lambda item: item["startedAt"], reverse=wanted.get("order") != "asc")
        return JSONResponse(found)

    async def _show(self, request: Request) -> Response:
        return JSONResponse(self._described(self._named(request)))

    async def _kill(self, request: Request) -> Response:
        await self._service.kill(self._named(request))
        return Response(status_code=204)

    async def _set_timeout(self, request: Request) -> Response:
        sandbox = self._named(request)
        self._service.set_timeout(sandbox, (await _read(request, TimeRequest)).timeout)
        return Response(status_code=204)

    async def _pause(self, request: Request) -> Response:
        sandbox = self._named(request)
        _check_memory((await _read(request, TimeRequest)).memory, wanted=True)
        await self._service.pause(sandbox)
        return Response(status_code=204)

    async def _resume(self, request: Request) -> Response:
        sandbox = self._named(request)
        asked = await _read(request, TimeRequest)
        _check_memory(asked.memory, wanted=True)
        await self._service.resume(sandbox, asked.timeout)
        return JSONResponse(_opened(sandbox), 201)

    async def _save(self, request: Request) -> Response:
        sandbox = self._named(request)
        _check_memory((await _read(request, FileRequest)).memory, wanted=False)
        return JSONResponse(_snapshot(await self._service.save(sandbox)), 201)

    async def _list_snapshots(self, request: Request) -> Response:
        wanted = request.query_params.get("sandboxID")
        found = [
            _snapshot(name)
            for name, (_, sandbox_id) in self._service.saved.items()
            if wanted in (None, sandbox_id)
        ]
        return JSONResponse(found)

    async def _forget(self, request: Request) -> Response:
        await self._service.forget(request.path_params["snapshot_id"])
        return Response(status_code=204)

    async def _fork(self, request: Request) -> Response:
        sandbox = self._named(request)
        asked = await _read(request, ForkRequest)
        made = await self._service.fork(sandbox, asked.count, asked.timeout)
        answers = [
            {"sandbox": _opened(item)}
            if isinstance(item, RentedSandbox)
            else {"error": _refusal(item)}
            for item in made
        ]
        return JSONResponse(answers, 201)

    def _described(self, sandbox: RentedSandbox) -> dict[str, Any]:
        limits = self._service.config.limits
        return {
            **_opened(sandbox),
            "metadata": dict(sandbox.metadata),
            "startedAt": datetime.fromtimestamp(sandbox.started_at, UTC).isoformat(),
            "endAt": datetime.fromtimestamp(sandbox.ends_at, UTC).isoformat(),
            "state": _state(sandbox),
            "cpuCount": os.cpu_count(),
            "memoryMB": limits.memory_bytes >> 20,
            "diskSizeMB": limits.writable_bytes >> 20,
        }


def build_app(service: SandboxService, key: str) -> Starlette:
    """The application of a server."""
    calls = SandboxCalls(service)

    async def refuse(request: Request) -> Response:
        raise Refused(
            "unimplemented", f"{request.method} {request.url.path} is not supported by this server"
        )

    routes = [
        *ControlPlane(service, key).routes(),
        Route("/health", calls.health),
        Route("/files", calls.download, methods=["GET"]),
        Route("/files", calls.upload, methods=["POST"]),
        Route("/{name:path}", calls.call, methods=["POST"]),
        Route("/{name:path}", refuse, methods=["GET", "PUT", "PATCH", "DELETE"]),
    ]
    return Starlette(
        routes=routes, exception_handlers={Refused: _answer_error, SandboxError: _answer_error}
    )


async def serve_sandboxes(
    config: SandboxServiceConfig, home: Path, host: str, port: int, tell: Callable[[str], None]
) -> None:
    """Serves until cancelled. `tell` gets the address when the server answers and its pool is full."""
    listener = bind(host, port, "--port")
    service = SandboxService(config)
    try:
        await service.fill()
        async with running_on(build_app(service, read_key(home)), listener):
            tell(f"http://{host}:{listener.getsockname()[1]}")
            await asyncio.Event().wait()
    finally:
        await service.close()


async def _read(request: Request, form: type[_Body]) -> _Body:
    try:
        return form.model_validate(read_json(await read_body(request, _MAX_BODY_BYTES)))
    except ValidationError as error:
        found = "; ".join(
            f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()
        )
        raise Refused("invalid_argument", found) from None


def _check_memory(asked: bool, *, wanted: bool) -> None:
    if asked is not wanted:
        text = (
            "keep processes: snapshots and forks hold files"
            if asked
            else "drop processes: pauses keep them"
        )
        raise Refused(
            "invalid_argument", f"memory is {str(asked).lower()}, but this server cannot {text}"
        )


def _state(sandbox: RentedSandbox) -> str:
    return "paused" if sandbox.is_paused else "running"


def _snapshot(snapshot_id: str) -> dict[str, Any]:
    return {"snapshotID": snapshot_id, "names": []}


def _opened(sandbox: RentedSandbox) -> dict[str, Any]:
    return {
        "sandboxID": sandbox.sandbox_id,
        "templateID": sandbox.template,
        "clientID": "ostinato",
        "envdVersion": ENVD_VERSION,
        "envdAccessToken": sandbox.token,
    }


def _refusal(error: Exception) -> dict[str, Any]:
    """An error in the control plane's form."""
    code = "internal"
    if isinstance(error, Refused):
        code = error.code
    elif isinstance(error, SandboxNotFound):
        code = "not_found"
    status = 503 if isinstance(error, CapacityExhausted | SandboxLost) else _STATUS[code]
    return {"code": status, "message": str(error)}


async def _answer_error(request: Request, error: Exception) -> Response:
    """An error as the SDK expects it. Its code is a word for calls of envd, else the HTTP status."""
    body = _refusal(error)
    headers = {"Should-Retry": "false"}
    if request.url.path.startswith(("/process.", "/filesystem.")):
        code = error.code if isinstance(error, Refused) else "unavailable"
        return JSONResponse({"code": code, "message": str(error)}, body["code"], headers)
    return JSONResponse(body, body["code"], headers)
