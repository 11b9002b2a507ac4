"""The HTTP server of rented sandboxes: E2B's control plane, and the calls to each sandbox, on one port."""

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from pydantic import Field, PositiveInt, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ostinato.infra.platform.errors import (
    CapacityExhausted,
    InvalidArgument,
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
_Handler = Callable[[Request, "SandboxRequest"], Awaitable[Any]]
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


class SandboxRequest(Record):
    """Body of any request to the control plane. Fields of E2B's that are not here, such as network rules, are refused."""

    template: str = Field(default="base", alias="templateID")
    timeout: float = 300.0
    metadata: dict[str, str] = Field(default_factory=dict)
    variables: dict[str, str] = Field(default_factory=dict, alias="envVars")
    has_network: bool = Field(default=True, alias="allow_internet_access")
    pauses_at_end: bool = Field(default=False, alias="autoPause")
    count: PositiveInt = Field(default=1, le=16, description="forks")
    memory: bool | None = Field(default=None, description="processes kept with the files")


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
        table = (
            ("POST", "/sandboxes", 201, self._create),
            ("GET", "/sandboxes", 200, self._list),
            ("GET", one, 200, self._show),
            ("DELETE", one, 204, self._kill),
            ("POST", f"{one}/timeout", 204, self._set_timeout),
            ("POST", f"{one}/pause", 204, self._pause),
            ("POST", f"{one}/resume", 201, self._resume),
            ("POST", f"{one}/connect", 201, self._resume),
            ("POST", f"{one}/snapshots", 201, self._save),
            ("POST", f"{one}/fork", 201, self._fork),
            ("GET", "/snapshots", 200, self._list_snapshots),
            ("DELETE", "/templates/{snapshot_id}", 204, self._forget),
        )
        return [
            Route(version + path, self._guarded(handler, status), methods=[method])
            for version in ("", "/v2")
            for method, path, status, handler in table
        ]

    def _guarded(self, handler: _Handler, status: int) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            given = request.headers.get("x-api-key", "").encode()
            if not secrets.compare_digest(given, self._key):
                raise Refused("unauthenticated", "header X-API-Key does not hold the server's key")
            try:
                body = read_json(await read_body(request, _MAX_BODY_BYTES))
                value = await handler(request, SandboxRequest.model_validate(body))
            except ValidationError as error:
                first = error.errors()[0]
                place = ".".join(map(str, first["loc"]))
                raise Refused("invalid_argument", f"{place}: {first['msg']}") from None
            return JSONResponse(value, status) if status != 204 else Response(status_code=status)

        return answer

    def _named(self, request: Request) -> RentedSandbox:
        return self._service.find(request.path_params["sandbox_id"])

    async def _create(self, _: Request, asked: SandboxRequest) -> Any:
        given = asked.model_dump(exclude={"template", "timeout", "count", "memory"})
        return _opened(await self._service.create(asked.template, asked.timeout, **given))

    async def _list(self, request: Request, _: SandboxRequest) -> Any:
        """All sandboxes on one page, the newest first."""
        wanted = request.query_params
        metadata = parse_qsl(wanted.get("metadata", ""))
        states = wanted.get("state", "running,paused").split(",")
        found = [
            self._described(sandbox)
            for sandbox in self._service.sandboxes.values()
            if all(sandbox.metadata.get(name) == value for name, value in metadata)
        ]
        found.sort(key=lambda item: item["startedAt"], reverse=wanted.get("order") != "asc")
        return [item for item in found if item["state"] in states]

    async def _show(self, request: Request, _: SandboxRequest) -> Any:
        return self._described(self._named(request))

    async def _kill(self, request: Request, _: SandboxRequest) -> None:
        await self._service.kill(self._named(request))

    async def _set_timeout(self, request: Request, asked: SandboxRequest) -> None:
        sandbox = self._named(request)
        if sandbox.is_paused:
            raise Refused("failed_precondition", f"{sandbox.gone}; resume it")
        self._service.set_timeout(sandbox, asked.timeout)

    async def _pause(self, request: Request, asked: SandboxRequest) -> None:
        if asked.memory is False:
            raise Refused("invalid_argument", "memory is false, but a pause keeps processes")
        await self._service.pause(self._named(request))

    async def _resume(self, request: Request, asked: SandboxRequest) -> Any:
        if asked.memory is False:
            raise Refused("invalid_argument", "memory is false, but a pause kept the processes")
        await self._service.resume(sandbox := self._named(request), asked.timeout)
        return _opened(sandbox)

    async def _save(self, request: Request, asked: SandboxRequest) -> Any:
        if asked.memory:
            raise Refused("invalid_argument", "memory is true, but a snapshot holds files alone")
        return _snapshot(await self._service.save(self._named(request)))

    async def _list_snapshots(self, request: Request, _: SandboxRequest) -> Any:
        wanted, saved = request.query_params.get("sandboxID"), self._service.saved
        return [_snapshot(name) for name, (_, owner) in saved.items() if wanted in (None, owner)]

    async def _forget(self, request: Request, _: SandboxRequest) -> None:
        await self._service.forget(request.path_params["snapshot_id"])

    async def _fork(self, request: Request, asked: SandboxRequest) -> Any:
        made = await self._service.fork(self._named(request), asked.count, asked.timeout)
        return [
            {"sandbox": _opened(item)}
            if isinstance(item, RentedSandbox)
            else {"error": _refusal(item)}
            for item in made
        ]

    def _described(self, sandbox: RentedSandbox) -> dict[str, Any]:
        limits = self._service.config.limits
        return {
            **_opened(sandbox),
            "metadata": dict(sandbox.metadata),
            "startedAt": datetime.fromtimestamp(sandbox.started_at, UTC).isoformat(),
            "endAt": datetime.fromtimestamp(sandbox.ends_at, UTC).isoformat(),
            "state": "paused" if sandbox.is_paused else "running",
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
    elif isinstance(error, InvalidArgument):
        code = "invalid_argument"
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
