"""Packages of the indexes that pip is configured with: queries by pip, and files fetched without pip.

`pip download` runs code of a source archive to get its metadata, even without a checksum to compare. Here files are
only copied. The options `index-url`, `extra-index-url`, `find-links`, `no-index`, `trusted-host`, `cert`, `proxy` and
`timeout` of pip's configuration apply.
"""

import functools
import json
import logging
import os
import re
import shutil
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
from packaging.version import InvalidVersion, Version
from tenacity import (
    retry,
    retry_if_exception_type,
    retry_if_result,
    stop_after_attempt,
    stop_after_delay,
    wait_exponential,
)
from unearth import Link, PackageFinder, TargetPython
from unearth.auth import MultiDomainBasicAuth
from unearth.errors import HashMismatchError, UnpackError
from unearth.evaluator import Package
from unearth.fetchers import PyPIClient
from unearth.finder import Source
from unearth.preparer import download_link

from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.source_archives import SUFFIXES
from ostinato.infra.platform.syntax import evaluate_literal

_SECONDS = 300  # for one package
_INSTALL_SECONDS = 1800  # for many
_MAX_FILE_BYTES = 4 << 30
_ATTEMPTS = 6  # as pip's
# settings of pip that change what it says, or forbid `--target`
_PIP_VARIABLES = {"PIP_QUIET": "0", "PIP_VERBOSE": "0", "PIP_USER": "0"}
_ON = ("1", "true", "yes", "on")
# fetch_file's error holds unearth's warnings
logging.getLogger("unearth").setLevel(logging.ERROR)


def newest_version(name: str) -> str:
    """The newest release of a package. ConfigError when the index has none."""
    said = _pip("index", "versions", name)
    found = re.match(r"\S+ \(([^)]+)\)", said)
    if found is None:
        raise ConfigError(f"package {name!r}: pip names no version: {said[:200]!r}")
    return found[1]


def pin(requirements: Sequence[str]) -> tuple[str, ...]:
    """The requirements and all their dependencies as name==version, from wheels only, so that nothing is built.
    ConfigError with pip's message when no such set exists.
    """
    if not requirements:
        return ()
    report = _pip(
        *("install", "--quiet", "--dry-run", "--ignore-installed", "--only-binary", ":all:"),
        *("--report", "-", *requirements),
    )
    found = [item["metadata"] for item in json.loads(report)["install"]]
    return tuple(sorted(f"{item['name'].lower()}=={item['version']}" for item in found))


def install_packages(
    requirements: Sequence[str], folder: Path, *, with_dependencies: bool = True
) -> None:
    """Installs Python packages into a folder, from wheels only, so that none of their code runs. ConfigError with
    pip's message on failure.
    """
    options = ("--quiet", *(() if with_dependencies else ("--no-deps",)))
    target = ("--only-binary", ":all:", "--target", str(folder))
    _pip("install", *options, *target, *requirements, seconds=_INSTALL_SECONDS)


def install_npm_packages(packages: Sequence[str], folder: Path) -> None:
    """Installs npm packages into a folder's node_modules without running their scripts. ConfigError with npm's
    message on failure.
    """
    npm = shutil.which("npm")
    if npm is None:
        raise ConfigError(f"npm is not on PATH, wanted it there to install {', '.join(packages)}")
    quiet = ("--no-audit", "--no-fund", "--loglevel", "error")
    command = [npm, "install", "--prefix", str(folder), "--ignore-scripts", *quiet, *packages]
    _run_to_end(command, "npm install", _INSTALL_SECONDS)


def read_pip_settings() -> dict[str, str]:
    """pip's options by name from its files and the environment, as they apply to `pip download`."""
    found = {"default-timeout": "15"}
    matches = [
        re.match(r"([^=]+)\.([\w-]+)=(.*)", line) for line in _pip("config", "list").splitlines()
    ]
    for section in ("global", "download", ":env:"):  # later sections override earlier ones
        found |= {m[2]: str(evaluate_literal(m[3])) for m in matches if m and m[1] == section}
    return found


@functools.cache
def default_index() -> str:
    """The index that pip uses when its settings name none. Distributions of Python and mirrors change it."""
    code = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
    return _run_to_end([sys.executable, "-P", "-c", code], "pip default index", _SECONDS).strip()


def _pip(command: str, *arguments: str, seconds: int = _SECONDS) -> str:
    pip = (sys.executable, "-P", "-m", "pip", command, *arguments, "--disable-pip-version-check")
    return _run_to_end(pip, f"pip {command}", seconds)


def _run_to_end(command: Sequence[str], title: str, seconds: int) -> str:
    """Output of a program. ConfigError with the end of its message when it fails. `title`: its name in errors."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=seconds,
            env=os.environ | _PIP_VARIABLES,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{title} did not end in {seconds} s") from error
    if done.returncode != 0:
        raise ConfigError(f"{title}: {(done.stderr or done.stdout).strip()[-600:]}")
    return done.stdout


class _Client(PyPIClient):
    """HTTP client that repeats requests after transient failures of the network or server."""

    @retry(
        retry=retry_if_exception_type(httpx2.TransportError)
        | retry_if_result(lambda answer: answer.is_server_error or answer.status_code == 429),
        stop=stop_after_attempt(_ATTEMPTS) | stop_after_delay(_SECONDS),
        wait=wait_exponential(multiplier=0.25, max=8),
        retry_error_callback=lambda state: state.outcome and state.outcome.result(),
    )
    def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """The response to a request. httpx2.TransportError when there is none after six tries."""
        return super().send(request, **options)


def fetch_file(
    name: str, version: str, sha256: str, folder: Path, *, is_wheel: bool = False
) -> Path:
    """Path of a source archive, or of the wheel that fits this interpreter best. The file is downloaded to `folder`,
    or stays where a local index has it. ConfigError when there is none, or when its checksum is not `sha256` (empty:
    the checksum that the index states).
    """
    settings = read_pip_settings()
    places = list(_find_places(settings))
    unread: list[str] = []  # pages that could not be read, and why
    with _open_client(settings, places, unread) as client:
        found: list[Link] = []
        for place in places:
            try:
                found += _find_links(client, place, name, version, is_wheel=is_wheel)
            except (httpx2.HTTPError, OSError, ValueError, TypeError, AttributeError) as error:
                unread.append(f"{_shown(place)} is no index: {error!r}")
        if not found:
            asked = ", ".join(map(_shown, places)) or "any index: pip has none"
            kind = "wheel for this interpreter" if is_wheel else "source archive"
            raise ConfigError("; ".join([f"no {kind} of it at {asked}", *unread]))
        best = min(found, key=lambda link: (_sha256_of(link) != sha256, _rank(link.filename)))
        wanted = sha256 or _sha256_of(best)
        return _download(client, best, folder, wanted, _MAX_FILE_BYTES, _SECONDS)


def _download(
    client: Any, link: Link, folder: Path, sha256: str, max_bytes: int, seconds: float
) -> Path:
    """Path of the downloaded file, or of the local file that the link names. `sha256`: empty for no check."""
    ends_at = time.monotonic() + seconds

    def check(link: Link, completed: int, total: int | None) -> None:
        if completed > max_bytes:
            raise ConfigError(f"{link.redacted} is more than {max_bytes} bytes")
        if time.monotonic() > ends_at:
            raise ConfigError(f"{link.redacted} did not end in {seconds:g} s")

    try:
        return download_link(client, link, folder, {"sha256": [sha256]} if sha256 else None, check)
    except HashMismatchError as error:
        raise ConfigError(
            f"{link.redacted} has sha256 {error.actual['sha256']}, wanted {sha256}"
        ) from None
    except (UnpackError, httpx2.HTTPError, OSError) as error:
        raise ConfigError(f"{link.redacted}: {error}") from None


class PackageIndexes:
    """The indexes and folders that pip is configured with, read for somebody who must not see their credentials."""

    def __init__(self, may_fetch: Callable[[str, int], bool]) -> None:
        """`may_fetch`: whether a file may come from a host and port that no index is at. ConfigError for settings of
        pip that cannot be used.
        """
        settings = read_pip_settings()
        self._places = list(_find_places(settings))
        self._origins = {_origin_of(place["url"]) for place in self._places}
        self._may_fetch = may_fetch
        self._client = _open_client(settings, self._places, [])
        self._files = _open_client(settings, self._places, [], self._refuse_place)

    def find(self, name: str) -> list[Link]:
        """All files of a package; none for an unknown package. ConfigError when nothing was found, and an index could
        not be read.
        """
        found: list[Link] = []
        unread: list[str] = []
        for place in self._places:
            try:
                files = _find_files(self._client, place, name, fits_interpreter=False)
                found += [file.link for file in files]
            except (httpx2.HTTPError, OSError, ValueError, TypeError, AttributeError) as error:
                unread.append(f"{_shown(place)} is no index: {type(error).__name__}")
        if unread and not found:
            raise ConfigError("; ".join(unread))
        return found

    def download(self, link: Link, folder: Path, max_bytes: int, seconds: float) -> Path:
        """Path of a file with the checksum that the index states, in `folder` or where a local index has it. ConfigError
        when it is missing, larger than `max_bytes`, slower than `seconds`, or differs.
        """
        return _download(self._files, link, folder, _sha256_of(link), max_bytes, seconds)

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()
        self._files.close()

    def _refuse_place(self, request: httpx2.Request) -> None:
        """Judges a link, and each redirect from it. Certificates tell that a server has the name that the index gives;
        without them, a name or address may be any server of the machine's own network.
        """
        scheme, host, port = origin = _origin_of(str(request.url))
        is_known = origin in self._origins or scheme == "https"
        if not is_known and (scheme != "http" or not self._may_fetch(host, port)):
            raise ConfigError(
                f"the index leads to {origin}, wanted itself, https or a public address"
            )


def _find_places(settings: Mapping[str, str]) -> Iterator[Source]:
    """Indexes and folders that may name files, in the order in which they are preferred."""
    for place in settings.get("find-links", "").split():
        folder = place if "://" in place else str(Path(place).expanduser())
        yield {"url": folder, "type": "find_links"}
    if settings.get("no-index", "").lower() not in _ON:
        main = settings.get("index-url") or default_index()
        for index in (main, *settings.get("extra-index-url", "").split()):
            yield {"url": index, "type": "index"}


def _find_links(
    client: Any, place: Source, name: str, version: str, *, is_wheel: bool
) -> Iterator[Link]:
    """Files of a version at an index or folder, best first."""
    for package in _find_files(client, place, name, fits_interpreter=is_wheel):
        if package.link.filename.endswith(".whl" if is_wheel else SUFFIXES) and _is_version(
            package.version or "", version
        ):
            yield package.link


def _find_files(
    client: Any, place: Source, name: str, *, fits_interpreter: bool
) -> Iterator[Package]:
    """Files of a package at an index or folder, best first, without links of a network page to local files."""
    # the default drops the micro version: 3.11 for 3.11.9
    python = TargetPython(py_ver=sys.version_info[:3])
    finder = PackageFinder(client, target_python=python, ignore_compatibility=not fits_interpreter)
    finder.sources = [place]
    is_local = not place["url"].startswith(("http://", "https://"))
    for package in finder.find_all_packages(name, allow_yanked=True):
        if is_local or not package.link.is_file:
            yield package


def _open_client(
    settings: Mapping[str, str],
    places: Sequence[Source],
    unread: list[str],
    judge: Callable[[httpx2.Request], None] = lambda request: None,
) -> Any:
    """An HTTP client configured by pip's settings. ConfigError when they cannot be used. `judge` sees each request.

    Typed as Any: unearth's annotations are narrower than what its client accepts.
    """

    def note(answer: httpx2.Response) -> None:
        if answer.is_error and answer.status_code != httpx2.codes.NOT_FOUND:
            unread.append(f"{answer.url} answered {answer.status_code}")

    certificates = settings.get("cert", "")
    timeout = settings.get("timeout") or settings["default-timeout"]
    try:
        return _Client(
            trusted_hosts=settings.get("trusted-host", "").split(),
            verify=ssl.create_default_context(cafile=certificates) if certificates else True,
            proxy=settings.get("proxy") or None,
            timeout=min(float(timeout), _SECONDS),
            follow_redirects=True,
            # an archive that the server compresses again would have another checksum
            headers={"Accept-Encoding": "identity"},
            auth=MultiDomainBasicAuth(
                prompting=False,
                index_urls=[place["url"] for place in places],
            ),
            event_hooks={"request": [judge], "response": [note]},
        )
    except (OSError, ValueError) as error:  # the URL of a proxy may hold a password
        raise ConfigError(
            f"pip's settings are cert={certificates!r}, timeout={timeout!r} and a proxy, wanted a file of "
            f"certificates, seconds and the URL of a proxy: {type(error).__name__}"
        ) from None


def _shown(place: Source) -> str:
    """URL of an index or folder without user name and password."""
    return Link(place["url"]).redacted


def _origin_of(url: str) -> tuple[str, str, int]:
    """Scheme, host and port of an index or file."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443)


def _sha256_of(link: Link) -> str:
    return (link.hash_option or {}).get("sha256", [""])[0]


def _rank(file_name: str) -> int:
    return next((n for n, suffix in enumerate(SUFFIXES) if file_name.endswith(suffix)), 0)


def _is_version(found: str, version: str) -> bool:
    try:
        return Version(found) == Version(version)
    except InvalidVersion:
        return found == version
