"""What a run shows in Prefect: tables, texts, links and pictures. None of it can end the run."""

import base64
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
from prefect import artifacts
from prefect.exceptions import PrefectException

from ostinato.flows.stages.naming import artifact_key

logger = logging.getLogger(__name__)


@contextmanager
def optional(what: str) -> Iterator[None]:
    """Logs and drops what the server does not take, because it is away for instance."""
    try:
        yield
    except (httpx.HTTPError, PrefectException, OSError, RuntimeError) as error:
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
    """The picture travels inside its own address: the server needs no file of the run."""
    url = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    with optional(key):
        artifacts.create_image_artifact(url, key=artifact_key(key), description=description)
