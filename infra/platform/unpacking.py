"""Unpacks untrusted archives within a size limit.

A few kilobytes can unpack to gigabytes. All bytes that are read or written are counted, including those between the
files of a tar stream, and ArchiveTooLarge names the limit. Declared sizes are enforced, not trusted.
"""

import bz2
import contextlib
import gzip
import io
import lzma
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from ostinato.infra.platform.errors import ConfigError

_BY_MAGIC = ((b"\x1f\x8b", gzip.open), (b"BZh", bz2.open), (b"\xfd7zXZ", lzma.open))
# errors of tarfile and zipfile for damaged input; RuntimeError: encrypted, or an unknown method
_BROKEN = (
    tarfile.TarError, zipfile.BadZipFile, EOFError, OSError, lzma.LZMAError, zlib.error, struct.error,
    ValueError, RuntimeError, OverflowError, IndexError,
)  # fmt: skip
# file type in the mode of a zip entry -> type of a tar entry; other types are devices, pipes and the like
_TYPES = {
    0: tarfile.REGTYPE,
    stat.S_IFREG: tarfile.REGTYPE,
    stat.S_IFDIR: tarfile.DIRTYPE,
    stat.S_IFLNK: tarfile.SYMTYPE,
}
_PIECE_BYTES = 64 << 10
_DIRECTORY_BYTES = 512  # limit of a zip's directory, per permitted entry


class ArchiveTooLarge(ConfigError):
    """An archive that unpacks to more than it may."""


class Member(NamedTuple):
    """One entry of a tar or zip archive. Its content can be read until the next entry is asked for."""

    info: tarfile.TarInfo
    content: Iterator[bytes]  # of a file, in pieces; of anything else empty

    @property
    def is_link(self) -> bool:
        return self.info.issym() or self.info.islnk()


def stream_members(
    archive: Path, max_bytes: int, *, max_entries: int | None = None, title: str | None = None
) -> Iterator[Member]:
    """Entries of a tar or zip archive in its order. `title`: its name in errors; None: its path."""
    label = title or str(archive)
    with _readable(label):
        if zipfile.is_zipfile(archive):
            most = None if max_entries is None else _DIRECTORY_BYTES * max_entries
            with _BoundedReader(archive, most, label) as file:
                yield from _zip_members(file, max_bytes, max_entries, label)
            return
        with _open_tar(archive, max_bytes, label) as opened:
            for number, info in enumerate(_count_tar(opened, label, max_bytes)):
                _check_entries(number + 1, max_entries, label)
                content = opened.extractfile(info) if info.isreg() else None
                yield Member(info, _pieces(content, label))


def read_members(archive: Path, max_bytes: int) -> Iterator[tuple[str, bytes]]:
    """Regular files of a tar or zip archive by name. Not more than `max_bytes` are unpacked."""
    for member in stream_members(archive, max_bytes):
        if member.info.isreg():
            yield member.info.name, b"".join(member.content)


def unpack(archive: Path, folder: Path, max_bytes: int) -> None:
    """Writes an archive's files below a folder, never outside of it."""
    label = str(archive)
    with _readable(label):
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as opened:
                _check_zip(opened, label, max_bytes)
                opened.extractall(folder)
            return
        with _open_tar(archive, max_bytes, label) as opened:
            opened.extractall(folder, _count_tar(opened, label, max_bytes), filter="data")  # type: ignore[arg-type]


@contextlib.contextmanager
def _open_tar(archive: Path, max_bytes: int, label: str) -> Iterator[tarfile.TarFile]:
    with archive.open("rb") as file:
        start = file.read(8)
    opener = next((known for magic, known in _BY_MAGIC if start.startswith(magic)), open)
    with opener(archive, "rb") as stream:
        # headers and padding may take as much as the files, and 1 MiB more
        counted = _Counted(stream, 2 * max_bytes + (1 << 20), max_bytes, label)  # type: ignore[arg-type]
        with tarfile.open(fileobj=counted, mode="r|") as opened:  # type: ignore[call-overload]
            yield opened


class _Counted(io.RawIOBase):
    """A stream that raises ArchiveTooLarge after `left` bytes."""

    def __init__(self, stream: IO[bytes], left: int, max_bytes: int, label: str) -> None:
        self._stream, self._left = stream, left
        self._max_bytes, self._label = max_bytes, label

    def read(self, size: int = -1) -> bytes:
        content = self._stream.read(min(size, self._left + 1) if size >= 0 else self._left + 1)
        self._left -= len(content)
        if self._left < 0:
            raise _too_large(self._label, self._max_bytes)
        return content


class _BoundedReader(io.FileIO):
    """A zip file that refuses reads of more than `most` bytes (None: any number): zipfile reads the
    directory in one piece and makes an object per entry.
    """

    def __init__(self, path: Path, most: int | None, label: str) -> None:
        super().__init__(path)
        self._most, self._label = most, label

    def read(self, size: int | None = -1) -> bytes:
        if self._most is not None and (size or 0) > max(self._most, _PIECE_BYTES):
            raise ArchiveTooLarge(
                f"archive {self._label} has a directory of {size} bytes, wanted less"
            )
        return super().read(size)


def _zip_members(
    file: IO[bytes] | io.FileIO, max_bytes: int, max_entries: int | None, label: str
) -> Iterator[Member]:
    with zipfile.ZipFile(file) as opened:  # type: ignore[arg-type]
        _check_entries(len(opened.infolist()), max_entries, label)
        _check_zip(opened, label, max_bytes)
        for entry in opened.infolist():
            info = tarfile.TarInfo(entry.filename)
            info.mode = entry.external_attr >> 16  # 0 when the writer stored no mode
            info.type = (
                tarfile.DIRTYPE if entry.is_dir() else _TYPES.get(stat.S_IFMT(info.mode), b"")
            )
            with opened.open(entry) if info.isreg() else contextlib.nullcontext() as content:
                yield Member(info, _pieces(content, label))


def _pieces(content: IO[bytes] | None, label: str) -> Iterator[bytes]:
    with _readable(label):
        while content is not None and (piece := content.read(_PIECE_BYTES)):
            yield piece


def _count_tar(opened: tarfile.TarFile, label: str, max_bytes: int) -> Iterator[tarfile.TarInfo]:
    total = 0
    for member in opened:
        total += member.size  # includes the holes of a sparse file
        if total > max_bytes:
            raise _too_large(label, max_bytes)
        yield member


def _check_zip(opened: zipfile.ZipFile, label: str, max_bytes: int) -> None:
    # reading a member ends at the size that is declared for it
    if sum(info.file_size for info in opened.infolist()) > max_bytes:
        raise _too_large(label, max_bytes)


def _check_entries(number: int, max_entries: int | None, label: str) -> None:
    if max_entries is not None and number > max_entries:
        raise ArchiveTooLarge(f"archive {label} has more than {max_entries} entries, wanted fewer")


def _too_large(label: str, max_bytes: int) -> ArchiveTooLarge:
    return ArchiveTooLarge(f"archive {label} unpacks to more than {max_bytes} bytes")


@contextlib.contextmanager
def _readable(label: str) -> Iterator[None]:
    try:
        yield
    except _BROKEN as error:
        raise ConfigError(
            f"archive {label} cannot be read: {error}; delete it or replace it by an intact one"
        ) from error
