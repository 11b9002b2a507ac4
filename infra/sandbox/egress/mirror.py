"""A mirror of the machine's package indexes for boxes: pages whose links lead back here, and files kept on disk.

The indexes' URLs and credentials stay in this process. Many attempts that ask for one file share one download.
"""

import asyncio
import hashlib
import html
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import quote

import httpx2
from unearth import Link

from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.packages import PackageIndexes
from ostinato.infra.sandbox.egress.config import EgressConfig
from ostinato.infra.sandbox.egress.dialing import Missing, Refusal, Unreachable, leads_outside

logger = logging.getLogger(__name__)
_PAGE_SECONDS = 600.0  # age after which a page is read again
_THREADS = 8
_KEPT_BYTES = 4 << 30  # of all files; the least recently used are removed first
_Result = TypeVar("_Result")


class IndexMirror:
    """Pages and files for all attempts of one process. Belongs to its event loop."""

    def __init__(self, config: EgressConfig) -> None:
        """Reads pip's settings. ConfigError when they cannot be used."""
        self._config = config
        self._indexes = PackageIndexes(leads_outside)
        self._folder = Path(tempfile.mkdtemp(prefix="ostinato-index-"))
        self._links: dict[tuple[str, str], Link] = {}  # by package and the token in a file's URL
        # an index that does not answer must not hold the threads of others
        self._threads = ThreadPoolExecutor(_THREADS, "index")
        self._pages: dict[str, asyncio.Task[list[Link]]] = {}
        self._pages_end_at = 0.0
        self._files: dict[str, asyncio.Task[Path]] = {}

    async def page(self, package: str) -> bytes:
        """The page of a package in HTML, with links to /files/PACKAGE/TOKEN/NAME. Missing for an unknown package."""
        if time.monotonic() > self._pages_end_at:
            self._pages, self._pages_end_at = {}, time.monotonic() + _PAGE_SECONDS
        links = await _once(self._pages, package, lambda: self._find(package))
        if not links:
            raise Missing(f"the index has no package {package}")
        return "\n".join(
            ["<!DOCTYPE html>", *(self._row(package, link) for link in links)]
        ).encode()

    async def open_file(self, package: str, token: str, name: str) -> BinaryIO:
        """A file whose link the package's page had, or its metadata. Missing for an unknown link."""
        link = self._links.get((package, token))
        if link is None:
            raise Missing("no page of this process had the link")
        if name == f"{link.filename}.metadata" and link.dist_info_link is not None:
            token, link = f"{token}.metadata", link.dist_info_link
        path = await _once(self._files, token, lambda: self._fetch(link, token))
        self._files[token] = self._files.pop(token)  # the last is the most recently used
        return path.open("rb")

    def close(self) -> None:
        """Ends the connections and removes the files."""
        self._indexes.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _find(self, package: str) -> list[Link]:
        return await self._outside(package, self._indexes.find, package)

    async def _fetch(self, link: Link, token: str) -> Path:
        config = self._config
        what = (link, self._folder / token, config.max_answer_bytes, config.request_seconds)
        try:
            path = await self._outside(link.filename, self._indexes.download, *what)
        except Refusal:
            shutil.rmtree(self._folder / token, ignore_errors=True)
            raise
        kept = [key for key, task in self._files.items() if task.done()]
        while kept and sum(item.stat().st_size for item in self._folder.glob("*/*")) > _KEPT_BYTES:
            shutil.rmtree(self._folder / kept[0], ignore_errors=True)
            del self._files[kept.pop(0)]
        return path

    async def _outside(self, what: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """A blocking call in a thread. Unreachable without the index's URL when it fails."""
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, call, *arguments)
        except (ConfigError, httpx2.HTTPError, OSError) as error:
            logger.warning("index gave no %s: %s", what, error)
            raise Unreachable(f"the index gave no {what}") from None

    def _row(self, package: str, link: Link) -> str:
        token = hashlib.sha256(link.normalized.encode()).hexdigest()[:32]
        self._links[package, token] = link
        stated = {
            "data-requires-python": link.requires_python,
            "data-yanked": None if link.yank_reason is None else str(link.yank_reason),
            "data-core-metadata": "true" if link.dist_info_metadata else None,
        }
        given = "".join(
            f' {key}="{html.escape(text)}"' for key, text in stated.items() if text is not None
        )
        checksum = (link.hash_option or {}).get("sha256")
        fragment = f"#sha256={checksum[0]}" if checksum else ""
        name = link.filename
        url = html.escape(f"/files/{package}/{token}/{quote(name)}{fragment}")
        return f'<a href="{url}"{given}>{html.escape(name)}</a><br>'


async def _once(
    tasks: dict[str, asyncio.Task[_Result]],
    key: str,
    start: Callable[[], Coroutine[Any, Any, _Result]],
) -> _Result:
    """The result of the key's task, which the first caller starts. A failed one is started again."""
    task = tasks.get(key)
    if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
        task = tasks[key] = asyncio.create_task(start())
    return await asyncio.shield(task)
