"""Process entry of the dashboard: `python -m ostinato.flows.operating.dashboard.process`."""

import sys

import uvicorn

from ostinato.flows.operating.dashboard.server import build_app
from ostinato.flows.operating.dashboard.snapshot import SnapshotReader
from ostinato.flows.stages.console import print_error
from ostinato.flows.stages.server_access import read_login
from ostinato.infra.platform.cluster.services import require_free_port
from ostinato.infra.platform.errors import OstinatoError
from ostinato.infra.platform.settings import Settings, load_settings
from ostinato.infra.platform.telemetry import configure_logging

HOST = "127.0.0.1"


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
    app = build_app(SnapshotReader(settings).take, settings.home / "reports", login)
    uvicorn.run(
        app,
        host=HOST,
        port=settings.dashboard_port,
        log_level="warning",
        timeout_graceful_shutdown=1,  # streams of events have no end of their own
    )


if __name__ == "__main__":
    main()
