"""Listens: an application on a port.

The socket is bound before anything is said to be up, so a busy port is one clear error.
"""

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import uvicorn
from starlette.types import ASGIApp

from ostinato.infra.platform.errors import ConfigError


def bind(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one. ConfigError names a port that is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            why = "already in use; stop that program or set OSTINATO_GATEWAY_PORT to a free port"
        else:
            why = f"not available: {error.strerror or error}"
        raise ConfigError(f"gateway address {host} port {port} is {why}") from error
    return listener


@asynccontextmanager
async def running_server(app: ASGIApp, host: str, port: int) -> AsyncIterator[str]:
    """Serves for the length of the block. Gives the base url once requests are answered."""
    listener = bind(host, port)
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5)
    server = _QuietServer(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started:
            if task.done():
                await task
                raise ConfigError(f"gateway on {host} port {port} ended while starting")
            await asyncio.sleep(0.01)
        bound_host, bound_port = listener.getsockname()[:2]
        yield f"http://{f'[{bound_host}]' if ':' in bound_host else bound_host}:{bound_port}"
    finally:
        server.should_exit = True
        with suppress(asyncio.CancelledError):
            await task
        listener.close()


async def serve(app: ASGIApp, host: str, port: int) -> None:
    """Serves until cancelled or interrupted."""
    listener = bind(host, port)
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5)
    try:
        await uvicorn.Server(config).serve(sockets=[listener])
    finally:
        listener.close()


class _QuietServer(uvicorn.Server):
    """Leaves the process's signal handlers alone: the block's owner decides when it ends."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
