"""Process entry of the Prefect server of a home: `python -m ostinato.flows.operating.prefect_server --port 4200`.

Prefect's own server for names of this machine alone: a page of another name that resolves to 127.0.0.1 gets no
answer. Login, origins and protection against CSRF are settings in its environment.
"""

import argparse
import os

import uvicorn
from prefect.server.api.server import create_app
from prefect.settings import get_current_settings
from starlette.middleware.trustedhost import TrustedHostMiddleware

HOST = "127.0.0.1"
NAMES = (HOST, "localhost")


def main() -> None:
    """Serves until interrupted."""
    parser = argparse.ArgumentParser(prog="ostinato.flows.operating.prefect_server")
    parser.add_argument("--port", type=int, required=True)
    port = parser.parse_args().port
    os.umask(0o077)  # the database and what else the server writes is for its user
    # around the app: automations call the app itself, by a name of Prefect's own
    app = TrustedHostMiddleware(create_app(final=True), allowed_hosts=[*NAMES])
    settings = get_current_settings().server
    uvicorn.run(
        app,
        host=HOST,
        port=port,
        log_level=settings.logging_level.lower(),
        timeout_keep_alive=settings.api.keepalive_timeout,
        ws_ping_interval=settings.api.websocket_ping_interval,
        ws_ping_timeout=settings.api.websocket_ping_timeout,
    )


if __name__ == "__main__":
    main()
