"""Source archives of packages, fetched once and kept.

The cache has one file per package and version, and its SHA-256. An archive that is not cached comes
from the index that pip is configured with. No code of an archive is run.
"""

import gzip
import hashlib
import io
import logging
import os
import re
import shutil
import tarfile
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from pydantic import Field

from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.folders import stays_below
from ostinato.infra.platform.record import Record
from ostinato.infra.platform.unpacking import read_members

_logger = logging.getLogger(__name__)
SUFFIXES = (".tar.gz", ".zip", ".tar.bz2", ".tar.xz")  # in order of preference
_LIBRARY = re.compile(r"^[^/]+\.data/(purelib|platlib)/")  # files that an installation moves up
_MAX_ARCHIVE_BYTES = 64 << 20  # of the files that are kept
_MAX_UNPACKED_BYTES = 512 << 20  # of all files together; one file at a time is in memory


class SourceArchive(Record):
    """One package of the index at one version, as source."""

    name: str = Field(description="name on the package index")
    version: str = Field(description="exact version")
    sha256: str = ""
    """checksum of the archive; empty: the checksum of the first download is stored and must stay the same"""


def fetch_archive(source: SourceArchive, cache: Path) -> Path:
    """The cached source archive, downloaded on the first call.

    Its checksum must be the pinned one, or the index's if none is pinned. The ConfigError says how to supply the
    archive by hand.
    """
    return _fetch(source, cache / f"{source.name}-{source.version}")


def store_archive(name: str, files: Mapping[str, bytes], cache: Path) -> SourceArchive:
    """Stores files that no index has in the cache, as an archive with their checksum as its version."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for path in sorted(files):
            member = tarfile.TarInfo(f"{name}/{path}")
            member.size = len(files[path])
            tar.addfile(member, io.BytesIO(files[path]))
    # without a time stamp the same files give the same archive
    content = gzip.compress(packed.getvalue(), mtime=0)
    sha256 = hashlib.sha256(content).hexdigest()
    source = SourceArchive(name=name, version=f"0+{sha256[:12]}", sha256=sha256)
    folder = cache / f"{source.name}-{source.version}"
    folder.mkdir(parents=True, exist_ok=True)
    _write_whole(folder / f"{name}.tar.gz", content)
    return source


def fetch_wheel(requirement: str, cache: Path, sha256: str = "") -> Path:
    """The cached wheel of `name==version`, fetched and checked as by `fetch_archive`."""
    name, _, version = requirement.partition("==")
    if not name or not version:
        raise ConfigError(f"dependency {requirement!r}, wanted name==version")
    source = SourceArchive(name=name, version=version, sha256=sha256)
    return _fetch(source, cache / "wheels" / f"{name}-{version}", is_wheel=True)


def read_wheel(wheel: Path, *, is_whole: bool = False) -> dict[str, bytes]:
    """Python files and data of a wheel by path. `is_whole`: with compiled modules and metadata. A path that leaves
    the folder raises ConfigError.
    """
    left_out = (".pyd", ".pyi", ".c", ".h") if is_whole else (".so", ".pyd", ".pyi", ".c", ".h")
    files: dict[str, bytes] = {}
    for name, content in read_members(wheel, _MAX_UNPACKED_BYTES):
        _check_path(wheel, name)
        path = _LIBRARY.sub("", name)
        is_left_out = path.endswith(left_out) or ".data/" in path or "/tests/" in path
        if not is_left_out and (is_whole or ".dist-info/" not in path):
            files[path] = content
    return files


def read_archive(archive: Path, below: str = "") -> dict[str, bytes]:
    """Regular files of an archive by path below its top folder, or below the folder `below` in it.

    Links are left out. A path that leaves the folder raises ConfigError.
    """
    prefix = f"{below}/" if below else ""
    files: dict[str, bytes] = {}
    total_bytes = 0
    for name, content in read_members(archive, _MAX_UNPACKED_BYTES):
        pure = PurePosixPath(name)
        _check_path(archive, name)
        path = PurePosixPath(*pure.parts[1:]).as_posix()
        if len(pure.parts) == 1 or not path.startswith(prefix):
            continue
        total_bytes += len(content)
        if total_bytes > _MAX_ARCHIVE_BYTES:
            raise ConfigError(f"archive {archive} unpacks to more than {_MAX_ARCHIVE_BYTES} bytes")
        files[path.removeprefix(prefix)] = content
    return files


def _check_path(archive: Path, path: str) -> None:
    if not stays_below(path):
        raise ConfigError(
            f"archive {archive} holds the path {path!r}, wanted paths below its top folder"
        )


def _fetch(source: SourceArchive, folder: Path, *, is_wheel: bool = False) -> Path:
    suffixes = (".whl",) if is_wheel else SUFFIXES
    known = _find_file(folder, suffixes)
    if known is None:
        _download(source, folder, is_wheel=is_wheel)
        known = _find_file(folder, suffixes)
    if known is None:
        raise ConfigError(_explain(source, folder, "the download was not stored"))
    found = hashlib.sha256(known.read_bytes()).hexdigest()
    wanted = source.sha256 or _read_checksum(folder, found)
    if found != wanted:
        kind = "wheel" if is_wheel else "source archive"
        raise ConfigError(
            f"{kind} {known} of {source.name}=={source.version} has sha256 {found}, "
            f"wanted {wanted}; delete it"
        )
    return known


def _find_file(folder: Path, suffixes: tuple[str, ...]) -> Path | None:
    found = [path for path in sorted(folder.glob("*")) if path.name.endswith(suffixes)]
    return found[0] if found else None


def _read_checksum(folder: Path, found: str) -> str:
    """The checksum stored when the file was new. If there is none, `found` is stored."""
    note = folder / "sha256"
    if not note.exists() or not note.read_text().strip():
        _write_whole(note, found.encode())
    return note.read_text().strip()


def _write_whole(path: Path, content: bytes) -> None:
    """Writes a temporary file and renames it, so that no reader sees a partial file, even with two writers."""
    partial = path.with_name(f"{os.getpid()}-{threading.get_ident()}.partial")
    partial.write_bytes(content)
    partial.replace(path)


def _download(source: SourceArchive, folder: Path, *, is_wheel: bool = False) -> None:
    """Downloads, copies next to the final path and renames, so that a kill leaves no partial archive."""
    # the HTTP client takes a quarter of a second to import, and every recipe imports this module
    from ostinato.infra.platform.packages import fetch_file  # noqa: PLC0415

    kind = "wheel" if is_wheel else "source archive"
    _logger.info("package=%s version=%s fetching=%r", source.name, source.version, kind)
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        try:
            path = fetch_file(source.name, source.version, source.sha256, place, is_wheel=is_wheel)
        except ConfigError as error:
            raise ConfigError(_explain(source, folder, str(error))) from None
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / place.name
        shutil.copyfile(path, partial)
        partial.replace(folder / path.name)


def _explain(source: SourceArchive, folder: Path, why: str) -> str:
    return (
        f"package {source.name}=={source.version} is missing: {why}\n"
        "fix: check the network and pip's index settings, or put its .tar.gz or .whl into "
        f"{folder}"
    )
