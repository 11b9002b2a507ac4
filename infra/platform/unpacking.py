"""Archives of others, unpacked within a bound.

A few kilobytes can say that they hold gigabytes. Everything read or written is counted, what a tar
stream holds beside its files too, and ConfigError names the bound. Sizes that an archive declares
are not believed but enforced.
"""

import bz2
import contextlib
import gzip
import io
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from ostinato.infra.platform.errors import ConfigError

_BY_MAGIC = ((b"\x1f\x8b", gzip.open), (b"BZh", bz2.open), (b"\xfd7zXZ", lzma.open))
_BROKEN = (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError, lzma.LZMAError, zlib.error)


def read_members(archive: Path, max_bytes: int) -> Iterator[tuple[str, bytes]]:
    """Regular files of a tar or zip archive by name. Not more than `max_bytes` are unpacked."""
    with _readable(archive):
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as opened:
                for info in _count_zip(opened, archive, max_bytes):
                    if not info.is_dir():
                        yield info.filename, opened.read(info)
            return
        with _open_tar(archive, max_bytes) as opened:
            for member in _count_tar(opened, archive, max_bytes):
                file = opened.extractfile(member) if member.isreg() else None
                if file is not None:
                    yield member.name, file.read()


def unpack(archive: Path, folder: Path, max_bytes: int) -> None:
    """Writes an archive's files below a folder, never outside of it."""
    with _readable(archive):
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as opened:
                opened.extractall(folder, members=_count_zip(opened, archive, max_bytes))
            return
        with _open_tar(archive, max_bytes) as opened:
            opened.extractall(folder, _count_tar(opened, archive, max_bytes), filter="data")  # type: ignore[arg-type]


@contextlib.contextmanager
def _open_tar(archive: Path, max_bytes: int) -> Iterator[tarfile.TarFile]:
    with archive.open("rb") as file:
        start = file.read(8)
    opener = next((known for magic, known in _BY_MAGIC if start.startswith(magic)), open)
    with opener(archive, "rb") as stream:
        # what stands between the files counts double at most
        counted = _Counted(stream, 2 * max_bytes + (1 << 20), archive)
        with tarfile.open(fileobj=counted, mode="r|") as opened:  # type: ignore[call-overload]
            yield opened


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class _Counted(io.RawIOBase):
    """A stream that ends with ConfigError after so many bytes."""

    def __init__(self, stream: _Readable, max_bytes: int, archive: Path) -> None:
        self._stream, self._left, self._archive = stream, max_bytes, archive
        self._max_bytes = max_bytes

    def read(self, size: int = -1) -> bytes:
        content = self._stream.read(min(size, self._left + 1) if size >= 0 else self._left + 1)
        self._left -= len(content)
        if self._left < 0:
            raise _too_large(self._archive, self._max_bytes)
        return content


def _count_tar(opened: tarfile.TarFile, archive: Path, max_bytes: int) -> Iterator[tarfile.TarInfo]:
    total = 0
    for member in opened:
        total += member.size  # of a sparse file: with its holes
        if total > max_bytes:
            raise _too_large(archive, max_bytes)
        yield member


def _count_zip(opened: zipfile.ZipFile, archive: Path, max_bytes: int) -> list[zipfile.ZipInfo]:
    # reading a member ends at the size that is declared for it
    if sum(info.file_size for info in opened.infolist()) > max_bytes:
        raise _too_large(archive, max_bytes)
    return opened.infolist()


def _too_large(archive: Path, max_bytes: int) -> ConfigError:
    return ConfigError(f"archive {archive} unpacks to more than {max_bytes} bytes")


@contextlib.contextmanager
def _readable(archive: Path) -> Iterator[None]:
    try:
        yield
    except _BROKEN as error:
        raise ConfigError(f"archive {archive} cannot be read: {error}; delete it") from error
