"""Source archives of packages at the indexes that pip is configured with, fetched without pip.

`pip download` asks a source archive for its metadata and thereby runs it, before its checksum is
known where none was given. Here only bytes move. Of pip's configuration `index-url`,
`extra-index-url`, `find-links`, `no-index`, `cert`, `proxy` and `timeout` count.
"""

import hashlib
import html
import json
import re
import ssl
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

import httpx
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from tenacity import (
    Retrying,
    retry_if_exception_type,
    stop_after_attempt,
    stop_after_delay,
    wait_exponential,
)

from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.packages.pip_questions import read_pip_settings
from ostinato.infra.platform.record import Record

SUFFIXES = (".tar.gz", ".zip", ".tar.bz2", ".tar.xz")  # the first is the first choice
_INDEX = "https://pypi.org/simple"
_ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.1"
_MAX_PAGE_BYTES = 64 << 20
_MAX_FILE_BYTES = 512 << 20
_SECONDS = 300  # for one package
_ATTEMPTS = 6  # as pip's
_LINK = re.compile(r"""<a\s[^>]*?href\s*=\s*["']([^"']+)""", re.IGNORECASE)
_ON = ("1", "true", "yes", "on")
_NETWORK = ("http", "https")


class IndexFile(Record):
    """One file as a page of an index names it."""

    name: str
    url: str
    sha256: str = ""


class _Passing(Exception):
    """Failure of the network that a second try may get past."""


class _Absent(ConfigError):
    """Answer of a server that has no such page or file."""


class IndexClient:
    """The indexes of pip's configuration, for one package."""

    def __init__(self) -> None:
        self._settings = read_pip_settings()
        self._ends_at = time.monotonic() + _SECONDS
        self._unread: list[str] = []  # pages that could not be, and why
        self._client = _open_client(self._settings)

    def fetch_source(self, name: str, version: str, sha256: str) -> tuple[str, bytes]:
        """File name and content of a source archive. ConfigError when there is none, or its checksum is
        not `sha256`, or where that is empty not the one that the index tells.
        """
        with self._client:
            found = [file for file in self._files(name) if _is_source(file.name, name, version)]
            if not found:
                asked = [_shown(page) for page in self._locations(name)]
                places = ", ".join(asked) or "any index: pip has none"
                raise ConfigError(
                    "; ".join([f"no source archive of it at {places}", *self._unread])
                )
            best = min(found, key=lambda file: (file.sha256 != sha256, _rank(file.name)))
            _, content = self._read(best.url, _MAX_FILE_BYTES)
        wanted, is_now = sha256 or best.sha256, hashlib.sha256(content).hexdigest()
        if wanted and is_now != wanted:
            raise ConfigError(f"{_shown(best.url)} has sha256 {is_now}, wanted {wanted}")
        return best.name, content

    def _locations(self, name: str) -> Iterator[str]:
        """Pages that may name files of the package, in the order in which they are preferred."""
        for place in self._settings.get("find-links", "").split():
            yield place if "://" in place else Path(place).expanduser().absolute().as_uri()
        if self._settings.get("no-index", "").lower() not in _ON:
            main = self._settings.get("index-url") or _INDEX
            for index in (main, *self._settings.get("extra-index-url", "").split()):
                yield f"{index.rstrip('/')}/{canonicalize_name(name)}/"

    def _files(self, name: str) -> Iterator[IndexFile]:
        """Files that the pages name. As for pip, a page that cannot be read is none."""
        for page in self._locations(name):
            try:
                yield from self._files_of(page)
            except ConfigError as error:
                self._unread += [] if isinstance(error, _Absent) else [str(error)]

    def _files_of(self, page: str) -> Iterator[IndexFile]:
        """Files that one page names. A page of the network names none of this machine."""
        if urlsplit(page).scheme not in _NETWORK:
            try:
                yield from _local_files(page)
            except OSError as error:
                raise ConfigError(f"{page}: {error}") from None
            return
        kind, content = self._read(page, _MAX_PAGE_BYTES)
        try:
            files = (
                _read_json(content, page) if kind.endswith("json") else _read_html(content, page)
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{_shown(page)} is no page of an index: {error!r}") from None
        for file in files:
            if urlsplit(file.url).scheme in _NETWORK:
                yield file.model_copy(update={"url": _with_password(file.url, page)})

    def _read(self, url: str, max_bytes: int) -> tuple[str, bytes]:
        """Media type and content of what lies at a URL."""
        if urlsplit(url).scheme not in _NETWORK:
            try:
                return "", _local_path(url).read_bytes()
            except OSError as error:
                raise ConfigError(f"{url}: {error}") from None
        again = Retrying(
            retry=retry_if_exception_type(_Passing),
            stop=stop_after_attempt(_ATTEMPTS) | stop_after_delay(_SECONDS),
            wait=wait_exponential(multiplier=0.25, max=8),
            reraise=True,
        )
        try:
            return again(self._get, url, max_bytes)
        except _Passing as error:
            raise ConfigError(str(error)) from None

    def _get(self, url: str, max_bytes: int) -> tuple[str, bytes]:
        # an archive that travels compressed once more would have another checksum
        headers = {"Accept": _ACCEPT, "Accept-Encoding": "identity"}
        content = bytearray()
        try:
            with self._client.stream("GET", url, headers=headers) as response:
                status = response.status_code
                if status == httpx.codes.NOT_FOUND:
                    raise _Absent(f"{_shown(url)} answered {status}")
                if response.is_server_error or status == httpx.codes.TOO_MANY_REQUESTS:
                    raise _Passing(f"{_shown(url)} answered {status}")
                if not response.is_success:
                    raise ConfigError(f"{_shown(url)} answered {status}")
                for chunk in response.iter_raw():
                    content += chunk
                    if len(content) > max_bytes:
                        raise ConfigError(f"{_shown(url)} is more than {max_bytes} bytes")
                    if time.monotonic() > self._ends_at:
                        raise ConfigError(f"{_shown(url)} did not end in {_SECONDS} s")
                kind = response.headers.get("Content-Type", "").partition(";")[0].strip()
                return kind, bytes(content)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            why = str(error).replace(url, _shown(url))
            raise _Passing(f"{_shown(url)}: {type(error).__name__}: {why}") from None


def _open_client(settings: Mapping[str, str]) -> httpx.Client:
    """A client as pip's settings want it. ConfigError when they cannot be used."""
    certificates = settings.get("cert", "")
    timeout = settings.get("timeout") or settings["default-timeout"]
    try:
        return httpx.Client(
            verify=ssl.create_default_context(cafile=certificates) if certificates else True,
            proxy=settings.get("proxy") or None,
            timeout=min(float(timeout), _SECONDS),
            follow_redirects=True,
        )
    except (OSError, ValueError) as error:  # an address of a proxy may hold a password
        raise ConfigError(
            f"pip's settings are cert={certificates!r}, timeout={timeout!r} and a proxy, wanted a file of "
            f"certificates, seconds and the URL of a proxy: {type(error).__name__}"
        ) from None


def _read_json(content: bytes, page: str) -> list[IndexFile]:
    """Files of a page as PEP 691 has it."""
    told: Mapping[str, Any] = json.loads(content)
    return [
        IndexFile(
            name=file["filename"],
            url=urljoin(page, file["url"]),
            sha256=file.get("hashes", {}).get("sha256", ""),
        )
        for file in told["files"]
    ]


def _read_html(content: bytes, page: str) -> list[IndexFile]:
    """Files of a page as PEP 503 has it: links that may end with #sha256=CHECKSUM."""
    files: list[IndexFile] = []
    for link in _LINK.findall(content.decode(errors="replace")):
        url, _, fragment = urljoin(page, html.unescape(link)).partition("#")
        sha256 = re.match(r"sha256=([0-9a-f]{64})", fragment)
        name = unquote(urlsplit(url).path).rpartition("/")[2]
        files.append(IndexFile(name=name, url=url, sha256=sha256[1] if sha256 else ""))
    return files


def _local_files(page: str) -> list[IndexFile]:
    """Files that a folder or a page of this machine names."""
    path = _local_path(page)
    if path.is_dir() and not (path / "index.html").is_file():
        return [IndexFile(name=file.name, url=file.as_uri()) for file in sorted(path.iterdir())]
    path = path / "index.html" if path.is_dir() else path
    return _read_html(path.read_bytes(), path.as_uri()) if path.is_file() else []


def _local_path(url: str) -> Path:
    return Path(urllib.request.url2pathname(urlsplit(url).path))


def _rank(file_name: str) -> int:
    return next(n for n, suffix in enumerate(SUFFIXES) if file_name.endswith(suffix))


def _is_source(file_name: str, name: str, version: str) -> bool:
    """Whether a file is called like a source archive of that package and version."""
    stem = next((file_name.removesuffix(s) for s in SUFFIXES if file_name.endswith(s)), "")
    for dash in re.finditer("-", stem):
        package, told = stem[: dash.start()], stem[dash.end() :]
        if canonicalize_name(package) == canonicalize_name(name) and _is_version(told, version):
            return True
    return False


def _is_version(told: str, version: str) -> bool:
    try:
        return Version(told) == Version(version)
    except InvalidVersion:
        return told == version


def _with_password(url: str, page: str) -> str:
    """The URL with the name and password of its page where both are of one host."""
    file, index = urlsplit(url), urlsplit(page)
    account, _, host = index.netloc.rpartition("@")
    is_same = (file.scheme, file.netloc) == (index.scheme, host)
    return file._replace(netloc=f"{account}@{host}").geturl() if account and is_same else url


def _shown(url: str) -> str:
    """The URL without name, password and query."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=host, query="", fragment="").geturl()
