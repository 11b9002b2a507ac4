"""Process entry of the Prefect server of a home: `python -m ostinato.flows.operating.prefect_server --port 4200`.

This is Prefect's own server, restricted to this machine's names: requests for another name that resolves to
127.0.0.1 are refused. Login, origins and CSRF protection are settings in its environment.
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
    os.umask(0o077)  # only its user may read the database and other files of the server
    # wrapped, not added as middleware, because automations call the app itself under another host name
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
