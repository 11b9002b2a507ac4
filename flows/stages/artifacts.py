"""What a run shows in Prefect: tables, texts, links and pictures. None of it can end the run."""

import base64
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import UUID

from prefect import artifacts
from prefect.client.orchestration import get_client

from ostinato.flows.stages.naming import artifact_key

logger = logging.getLogger(__name__)


@contextmanager
def optional(what: str) -> Iterator[None]:
    """Logs and drops what cannot be shown: the server is away or refuses it, or it cannot be drawn."""
    try:
        yield
    except Exception as error:
        logger.warning("artifact=%s not_shown=%s: %s", what, type(error).__name__, error)


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
    with optional(key):
        artifacts.create_image_artifact(
            _address_of(png), key=artifact_key(key), description=description
        )


def refresh_image(png: bytes, key: str, description: str, shown: UUID | None) -> UUID:
    """Puts a picture in the place of the one that is `shown`, or beside all others. Returns its id. Raises.

    `key`: the whole one. Not by Prefect's own update, which sends each picture as an event too.
    """
    if shown is None:
        made = artifacts.create_image_artifact(_address_of(png), key=key, description=description)
        return made if isinstance(made, UUID) else UUID(str(made))
    with get_client(sync_client=True) as client:
        change = {"data": _address_of(png)}
        client.request("PATCH", "/artifacts/{id}", path_params={"id": shown}, json=change)
    return shown


def _address_of(png: bytes) -> str:
    """The picture travels inside its own address: the server needs no file of the run."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
