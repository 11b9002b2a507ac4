"""The object store: whole objects by key, stored atomically and checked when they are read."""

import errno
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO
from urllib.parse import unquote, urlsplit

from ostinato.infra.platform.errors import ConfigError, StorageError
from ostinato.infra.platform.objects.local import LocalBackend, checksum_bytes, checksum_file
from ostinato.infra.platform.objects.s3 import S3Backend
from ostinato.infra.platform.settings import Settings


class DamagedObject(StorageError):
    """An object that is missing, or whose bytes differ from those that were stored."""


class ObjectStore:
    """One place for bytes. Safe to use from several threads and processes at once."""

    def __init__(self, url: str, backend: LocalBackend | S3Backend) -> None:
        self.url = url
        self._backend = backend

    @classmethod
    def from_url(cls, url: str, settings: Settings | None = None) -> "ObjectStore":
        """Open `file:///absolute/path`, or `s3://bucket/prefix` with the endpoint and credentials of the settings.
        Nothing is contacted yet. The store of an installation is opened by `open_object_store`.
        """
        parts = urlsplit(url)
        if parts.query or parts.fragment:
            raise ConfigError(
                f"object store URL is {url!r}, wanted %23 for # and %3F for ?: a path ends there"
            )
        if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/"):
            return cls(url, LocalBackend(Path(unquote(parts.path))))
        if parts.scheme == "s3" and parts.netloc and settings is None:
            raise ConfigError(f"object store URL is {url!r} without settings, wanted them")
        if parts.scheme == "s3" and parts.netloc and settings is not None:
            return cls(url, S3Backend(parts.netloc, parts.path.strip("/"), settings))
        raise ConfigError(
            f"object store URL is {url!r}, wanted file:///absolute/path or s3://bucket/prefix"
        )

    def put_bytes(self, key: str, data: bytes) -> str:
        """Store atomically, replacing an object that is there. Returns the checksum."""
        with self._operation("put", key):
            self._backend.write(key, data)
        return checksum_bytes(data)

    def put_new(self, key: str, data: bytes) -> bool:
        """Store only if the key is free, atomically: exactly one of several callers gets True."""
        with self._operation("put", key):
            return self._backend.write_new(key, data)

    def put_file(self, key: str, path: Path) -> str:
        """Store a file atomically. Returns the checksum."""
        checksum = checksum_file(path)
        with self._operation("put", key):
            self._backend.upload(key, path)
        return checksum

    def get_bytes(self, key: str, checksum: str | None = None) -> bytes:
        """The object. With `checksum` given, bytes that differ raise StorageError."""
        with self._operation("get", key):
            data = self._backend.read(key)
        if checksum is not None:
            self._check(key, checksum_bytes(data), checksum)
        return data

    def get_file(self, key: str, path: Path, checksum: str | None = None) -> Path:
        """Copy the object to `path`, which appears whole and checked or not at all."""
        with self._operation("get", key):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.parent / f".get-{uuid.uuid4().hex}"
            try:
                self._backend.download(key, temporary)
                if checksum is not None:
                    self._check(key, checksum_file(temporary), checksum)
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
        return path

    def exists(self, key: str) -> bool:
        with self._operation("look for", key):
            return self._backend.exists(key)

    def list(self, prefix: str = "") -> list[str]:
        """Sorted keys that begin with `prefix` (a string prefix; end it with / for a folder)."""
        with self._operation("list", prefix or "."):
            return self._backend.keys(prefix)

    def sizes(self, folder: str) -> dict[str, int]:
        """Bytes of the objects in a folder, by key. `folder` ends with /."""
        with self._operation("list", folder):
            return self._backend.sizes(folder)

    def changed_at(self, folder: str) -> dict[str, float]:
        """Time of the last write of each object in a folder, by key, in seconds since the epoch. Includes uploads
        under way if the store shows them. `folder` ends with /.
        """
        with self._operation("list", folder):
            return self._backend.changed_at(folder)

    def versions(self, path: str, suffix: str = "") -> dict[str, str]:
        """A checksum or an ETag by key, which changes with the bytes, for the object `path` or for the objects
        below it that end in `suffix`. An empty path is the whole store.
        """
        with self._operation("list", path or "."):
            return self._backend.versions(path, suffix)

    @contextmanager
    def open(self, key: str) -> Iterator[IO[bytes]]:
        """The object as a seekable file that is read in pieces."""
        with self._operation("read", key):
            file = self._backend.open(key)
        with file:
            yield file

    def delete(self, key: str) -> None:
        """Remove the object. Nothing happens if there is none."""
        with self._operation("delete", key):
            self._backend.remove(key)

    def _check(self, key: str, seen: str, wanted: str) -> None:
        if seen != wanted:
            raise DamagedObject(
                f"object {key} in {self.url} is corrupt: checksum {seen}, wanted {wanted}"
            )

    @contextmanager
    def _operation(self, verb: str, key: str) -> Iterator[None]:
        path = PurePosixPath(key)
        if not key or path.is_absolute() or ".." in path.parts or "\\" in key:
            raise ValueError(f"object key is {key!r}, wanted a relative path without ..")
        try:
            yield
        except StorageError:
            raise
        except FileNotFoundError as error:
            raise DamagedObject(f"cannot {verb} {key} in {self.url}: {_explain(error)}") from error
        except Exception as error:  # s3fs lets botocore and aiohttp types through
            raise StorageError(f"cannot {verb} {key} in {self.url}: {_explain(error)}") from error


def _explain(error: Exception) -> str:
    kind = type(error).__name__
    if isinstance(error, FileNotFoundError):
        return "no such object or bucket"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return "the disk is full; free space, then run again"
    if isinstance(error, PermissionError):
        return f"permission denied ({error}); check the URL and credentials"
    if "Credentials" in kind:
        return f"{error}; set OSTINATO_S3_ACCESS_KEY_ID and OSTINATO_S3_SECRET_ACCESS_KEY"
    if "Connect" in kind or "Timeout" in kind or "Endpoint" in str(error):
        return f"unreachable ({kind}: {error}); check OSTINATO_S3_ENDPOINT_URL and the network"
    return f"{kind}: {error}"


def open_object_store(settings: Settings, url: str | None = None) -> ObjectStore:
    """The store of the settings, or the store at `url` with the endpoint and credentials of the settings."""
    return ObjectStore.from_url(url or settings.object_store_url, settings)
