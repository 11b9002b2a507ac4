"""Unpacking of a client's archive: plain files inside one folder, which only their owner can access."""

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.unpacking import ArchiveTooLarge, Member, stream_members
from ostinato.infra.sandbox.repository import CACHE_DIRECTORIES
from ostinato.infra.serving.gateway.failures import ApiError

MAX_NAME_BYTES = 255
MAX_PATH_BYTES = 2_000  # Linux takes 4,095 for an absolute path
WANTED = (
    f"inside the repository that is no folder, is not below a file, and has at most {MAX_NAME_BYTES} "
    f"bytes per name and {MAX_PATH_BYTES} in all"
)


def is_path(text: str) -> bool:
    """Whether a file of this relative path can lie in some folder."""
    pure = PurePosixPath(text)
    is_inside = bool(pure.parts) and not pure.is_absolute() and ".." not in pure.parts
    try:
        names = [len(part.encode()) for part in pure.parts]
    except UnicodeEncodeError:  # bytes that are not UTF-8
        return False
    is_short = max(names, default=0) <= MAX_NAME_BYTES and sum(names) < MAX_PATH_BYTES
    return is_inside and "\0" not in text and str(pure) == text and is_short


MAX_ARCHIVE_BYTES = 16 << 20
MAX_UNPACKED_BYTES = 64 << 20
MAX_FILE_BYTES = 4 << 20
MAX_ENTRIES = 5_000
_MAGICS = (b"\x1f\x8b", b"PK\x03\x04")  # gzip, zip
_BLOCK_BYTES = 4_096
_TITLE = "of the request"


@dataclass(slots=True)
class Unpacked:
    """Content of an archive."""

    files: set[str] = field(default_factory=set)
    folders: set[str] = field(default_factory=set)
    num_bytes: int = 0

    @property
    def disk_bytes(self) -> int:
        """Most bytes that files and folders take on disk, in whole blocks."""
        blocks = self.num_bytes // _BLOCK_BYTES + len(self.files) + len(self.folders)
        return blocks * _BLOCK_BYTES


def unpack_repository(archive: Path, folder: Path) -> Unpacked:
    """Writes the files of a tar.gz or zip archive below `folder`, which does not exist yet. ApiError when any
    part of the archive breaks a limit. Folders of version control and caches are left out.
    """
    with archive.open("rb") as file:
        if not file.read(4).startswith(_MAGICS):
            raise ApiError(
                415, "body is not a gzip or zip file, wanted a .tar.gz or a .zip",
                code="unsupported_archive",
            )  # fmt: skip
    folder.mkdir(mode=0o700)
    found = Unpacked()
    try:
        members = stream_members(archive, MAX_UNPACKED_BYTES, max_entries=MAX_ENTRIES, title=_TITLE)
        for member in members:
            _unpack_member(member, folder, found)
    except ArchiveTooLarge as error:
        raise _too_large(str(error)) from error
    except ConfigError as error:
        raise _invalid(str(error)) from error
    if not found.files:
        raise _invalid(f"archive {_TITLE} holds no files, wanted a repository")
    return found


def _unpack_member(member: Member, folder: Path, found: Unpacked) -> None:
    path = PurePosixPath(member.info.name)
    if not path.parts or not CACHE_DIRECTORIES.isdisjoint(path.parts):
        return
    name = str(path)
    if not is_path(name):
        raise _invalid(f"entry is {_shown(member.info.name)}, wanted a path {WANTED}")
    if member.info.isdir():
        _add_folders(name, (path, *path.parents), found)
        return
    if not member.info.isreg():
        kind = "link" if member.is_link else "device, pipe or the like"
        raise _invalid(
            f"entry {_shown(name)} is a {kind}, wanted files and folders (tar's option -h "
            "stores the targets of links)"
        )
    _add_folders(name, path.parents, found)
    if name in found.files or name in found.folders:
        raise _invalid(f"entry {_shown(name)} comes twice, wanted each path once")
    found.files.add(name)
    found.num_bytes += _write(member, folder, path)


def _add_folders(name: str, folders: Iterable[PurePosixPath], found: Unpacked) -> None:
    names = {str(folder) for folder in folders} - {"."}
    if not found.files.isdisjoint(names):
        raise _invalid(f"entry {_shown(name)} lies below a file, wanted a path {WANTED}")
    found.folders |= names
    if len(found.folders) > MAX_ENTRIES:
        raise _too_large(f"archive {_TITLE} has more than {MAX_ENTRIES} folders, wanted fewer")


def _write(member: Member, folder: Path, path: PurePosixPath) -> int:
    """Writes the member's content, and returns its number of bytes."""
    for above in reversed(path.parents[:-1]):
        (folder / above).mkdir(mode=0o700, exist_ok=True)
    mode = 0o700 if member.info.mode & stat.S_IXUSR else 0o600
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    size = 0
    with os.fdopen(os.open(folder / path, flags, mode), "wb") as file:
        for piece in member.content:
            size += len(piece)
            if size > MAX_FILE_BYTES:
                raise _too_large(
                    f"entry {_shown(member.info.name)} has more than {MAX_FILE_BYTES} bytes, wanted less"
                )
            file.write(piece)
    return size


def _shown(name: str) -> str:
    return ascii(name[:80])


def _invalid(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_archive")


def _too_large(message: str) -> ApiError:
    return ApiError(413, message, code="archive_too_large")
