"""What a run shows in Prefect: tables, texts, links and progress. None of it can end the run: what
the server does not take, because it is away for instance, is logged and dropped.
"""

import contextvars
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import httpx
from prefect import artifacts
from prefect.exceptions import PrefectException

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 5.0


@contextmanager
def _optional(what: str) -> Iterator[None]:
    try:
        yield
    except (httpx.HTTPError, PrefectException, OSError, RuntimeError) as error:
        logger.warning("artifact=%s not_shown=%s: %s", what, type(error).__name__, error)


def show_table(rows: Sequence[dict[str, Any]], key: str, description: str) -> None:
    """Shows rows as a table of the run."""
    with _optional(key):
        artifacts.create_table_artifact(list(rows), key=key, description=description)


def show_markdown(text: str, key: str, description: str | None = None) -> None:
    """Shows a text of the run."""
    with _optional(key):
        artifacts.create_markdown_artifact(text, key=key, description=description)


def show_link(url: str, key: str, description: str) -> None:
    """Shows a link of the run."""
    with _optional(key):
        artifacts.create_link_artifact(url, key=key, description=description)


class ProgressArtifact:
    """Progress of a stage, told to the server by a thread of its own: a server that is away costs
    the stage no time, and gets the newest value when it is back.
    """

    def __init__(self, key: str, description: str) -> None:
        self._key, self._description = key, description
        self._percent = 0.0
        self._changed = threading.Event()
        self._is_over = threading.Event()
        self._thread = threading.Thread(
            target=contextvars.copy_context().run, args=(self._tell,), daemon=True
        )

    def __enter__(self) -> Self:
        self._changed.set()
        self._thread.start()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._changed.set()
        self._thread.join(_RETRY_SECONDS)

    def update(self, percent: float) -> None:
        """Notes how far the stage is; returns at once."""
        self._percent = percent
        self._changed.set()

    def _tell(self) -> None:
        artifact_id: Any = None
        while not self._is_over.is_set() or self._changed.is_set():
            self._changed.wait()
            self._changed.clear()
            percent, is_told = self._percent, False
            with _optional(self._key):
                if artifact_id is None:
                    artifact_id = artifacts.create_progress_artifact(
                        percent, key=self._key, description=self._description
                    )
                else:
                    artifacts.update_progress_artifact(artifact_id, percent)
                is_told = True
            if not is_told and not self._is_over.wait(_RETRY_SECONDS):
                self._changed.set()
