"""The dashboard, `python -m ostinato.flows.operating.dashboard.server`: a page, its live data as server-sent events,
plots and attempts of each run, and the reports.

It answers only under this machine's own names, requires the login of the home's Prefect server, and is read-only. Use
ssh -L to reach it from another machine.
"""

import asyncio
import base64
import hashlib
import hmac
import re
import sys
import time
from collections.abc import AsyncIterator, Callable
from functools import cache
from pathlib import Path
from urllib.parse import quote

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import (
    FileResponse,
    HTMLResponse,
    JSONResponse,
    RedirectResponse,
    StreamingResponse,
)
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.staticfiles import StaticFiles

from ostinato.flows import reporting
from ostinato.flows.operating.dashboard.runs import (
    AttemptLine,
    AttemptTable,
    RunPage,
    find_run,
    find_run_id,
    read_run,
)
from ostinato.flows.operating.dashboard.snapshot import DashboardSnapshot, SnapshotReader
from ostinato.flows.reporting.attempt_files import attempts_page, group_page
from ostinato.flows.reporting.attempts import find_attempts
from ostinato.flows.stages.console import print_error
from ostinato.flows.stages.server_access import basic_header, read_login
from ostinato.infra.platform.cluster.services import require_free_port
from ostinato.infra.platform.errors import ConfigError, OstinatoError
from ostinato.infra.platform.ledger import open_ledger
from ostinato.infra.platform.objects import open_object_store
from ostinato.infra.platform.settings import Settings, load_settings
from ostinato.infra.platform.telemetry import configure_logging

HOST = "127.0.0.1"
ASSETS = Path(__file__).parent / "assets"
TEMPLATES = Path(reporting.__file__).parent / "templates"
_POLICY = (
    "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; script-src 'self'"
)
_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)


def content_policy() -> str:
    """A policy that allows scripts only from the page itself, and those in report templates only by their hash,
    because reports show text written by models.
    """
    texts = (path.read_text() for path in sorted(TEMPLATES.glob("*.html")))
    scripts = {script for text in texts for script in _SCRIPT.findall(text)}
    digests = (hashlib.sha256(script.encode()).digest() for script in sorted(scripts))
    allowed = [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]
    return " ".join([_POLICY, *allowed])


class LatestSnapshot:
    """The newest snapshot, taken when a client waits for it and shared by all clients."""

    def __init__(self, take: Callable[[], DashboardSnapshot], every_seconds: float) -> None:
        self._take, self._every_seconds = take, every_seconds
        self._lock = asyncio.Lock()
        self._text, self._taken_at = "", 0.0

    async def text(self) -> str:
        """The snapshot as JSON."""
        async with self._lock:
            if time.monotonic() - self._taken_at > self._every_seconds:
                snapshot = await asyncio.to_thread(self._take)
                self._text, self._taken_at = snapshot.model_dump_json(), time.monotonic()
            return self._text


def build_app(settings: Settings, login: str, every_seconds: float = 5.0) -> FastAPI:
    """The application over a home. `login` is user:password."""
    app = FastAPI(title="Ostinato dashboard", docs_url=None, redoc_url=None, openapi_url=None)
    latest = LatestSnapshot(SnapshotReader(settings).take, every_seconds)
    _restrict(app, login)

    @app.get("/")
    async def page() -> FileResponse:
        return FileResponse(ASSETS / "dashboard.html")

    @app.get("/snapshot")
    async def snapshot() -> Response:
        return Response(await latest.text(), media_type="application/json")

    @app.get("/events")
    async def events(request: Request) -> StreamingResponse:
        async def stream() -> AsyncIterator[str]:
            while not await request.is_disconnected():
                yield f"data: {await latest.text()}\n\n"
                await asyncio.sleep(every_seconds)

        return StreamingResponse(stream(), media_type="text/event-stream")

    _add_runs(app, settings)
    reports = settings.home / "reports"
    app.mount("/assets", StaticFiles(directory=ASSETS), name="assets")
    app.mount("/reports", StaticFiles(directory=reports, check_dir=False), name="reports")
    return app


def _restrict(app: FastAPI, login: str) -> None:
    """Answers only with the login and under this machine's own names, and sets the content policy."""
    policy, wanted = content_policy(), basic_header(login).encode()

    @app.middleware("http")
    async def restrict(request: Request, call_next: Callable[..., object]) -> Response:
        given = request.headers.get("authorization", "").encode()
        if not hmac.compare_digest(given, wanted):
            return Response(status_code=401, headers={"www-authenticate": 'Basic realm="Ostinato"'})
        response: Response = await call_next(request)  # type: ignore[misc]
        response.headers["content-security-policy"] = policy
        response.headers["x-content-type-options"] = "nosniff"
        return response

    app.add_middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])


def _add_runs(app: FastAPI, settings: Settings) -> None:
    """Routes of runs and attempts. They read files and may block, so each runs in a thread."""

    @cache
    def table() -> AttemptTable:
        return AttemptTable(open_ledger(settings), open_object_store(settings))

    @app.get("/runs/{name}/{folder}")
    def run(name: str, folder: str) -> RunPage:
        return read_run(_found(settings.home, f"{name}/{folder}"))

    @app.get("/runs/{name}/{folder}/attempts")
    def attempts(name: str, folder: str) -> list[AttemptLine]:
        return table().lines(_found(settings.home, f"{name}/{folder}").name)

    @app.get("/attempts/{name}")
    def attempt(name: str) -> Response:
        if (run := find_run_id(settings.home, name)) is not None:
            return RedirectResponse(f"/#attempts?run={quote(run, safe='')}")
        try:
            found = find_attempts(settings, name)
        except ConfigError as error:
            raise HTTPException(404, str(error)) from None
        is_group = len(found) > 1 and all("journal" in one.facts for one in found)  # else a session
        return HTMLResponse((group_page if is_group else attempts_page)(name, found))

    @app.exception_handler(OstinatoError)
    def tell(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 503)  # a store or ledger that does not answer


def _found(home: Path, run: str) -> Path:
    directory = find_run(home, run)
    if directory is None:
        raise HTTPException(404, f"{run}: no run of this home has this name and has metrics")
    return directory


def main() -> None:
    """Serves until interrupted. Exit code 2 when the port is busy."""
    configure_logging()
    try:
        serve(load_settings())
    except OstinatoError as error:
        print_error(error)
        sys.exit(2)


def serve(settings: Settings) -> None:
    """Serves the dashboard of a home."""
    require_free_port(settings.dashboard_port, "the dashboard")
    login = read_login(settings.home)
    app = build_app(settings, login)
    uvicorn.run(
        app,
        host=HOST,
        port=settings.dashboard_port,
        log_level="warning",
        timeout_graceful_shutdown=1,  # event streams never end by themselves
    )


if __name__ == "__main__":
    main()
