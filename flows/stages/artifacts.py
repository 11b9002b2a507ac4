"""Tables, texts, links and pictures that a run shows in Prefect. A failure to show one never ends the run."""

import base64
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import UUID

from prefect import artifacts
from prefect.client.orchestration import get_client

from ostinato.flows.stages.naming import artifact_key
from ostinato.infra.platform.settings import Settings

logger = logging.getLogger(__name__)


@contextmanager
def optional(what: str) -> Iterator[None]:
    """Logs and suppresses every error of the block: a server that is down or refuses, or a failed drawing."""
    try:
        yield
    except Exception as error:
        logger.warning("artifact=%s not_shown=%s: %s", what, type(error).__name__, error)


def link_to_plots(directory: Path, settings: Settings) -> str:
    """A Markdown link from Prefect to the plots of a run directory on the dashboard of `ostinato up`."""
    run = quote(f"{directory.parent.name}/{directory.name}", safe="")
    place = f"http://127.0.0.1:{settings.dashboard_port}/#runs?run={run}"
    return f"[plots of {directory.name}]({place})"


def show_table(rows: Sequence[dict[str, Any]], key: str, description: str) -> None:
    with optional(key):
        artifacts.create_table_artifact(list(rows), key=artifact_key(key), description=description)


def show_markdown(text: str, key: str, description: str | None = None) -> None:
    with optional(key):
        artifacts.create_markdown_artifact(text, key=artifact_key(key), description=description)


def show_link(url: str, key: str, description: str) -> None:
    with optional(key):
        artifacts.create_link_artifact(url, key=artifact_key(key), description=description)


def show_image(png: bytes, key: str, description: str) -> None:
    show_markdown(_as_markdown(png), key, description)


def refresh_image(png: bytes, key: str, description: str, shown: UUID | None) -> UUID:
    """Replaces the picture with the id `shown`, or creates one when it is None. Returns the id. Errors are raised.

    `key` is the full key. Prefect's own update is avoided because it also sends each picture as an event.
    """
    if shown is None:
        found = artifacts.create_markdown_artifact(_as_markdown(png), key, description)
        return found if isinstance(found, UUID) else UUID(str(found))
    with get_client(sync_client=True) as client:
        change = {"data": _as_markdown(png)}
        client.request("PATCH", "/artifacts/{id}", path_params={"id": shown}, json=change)
    return shown


def _as_markdown(png: bytes) -> str:
    """A text that holds the picture, so that the server needs no file of the run. Prefect prints the whole address
    below an artifact of type image, and below one of type Markdown none.
    """
    return f"![picture](data:image/png;base64,{base64.b64encode(png).decode()})"
