"""Keys of tenants in one file: issued and revoked by a command, reread by a running gateway.

The file holds digests. A key is shown once, when it is issued.
"""

import hashlib
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock
from pydantic import TypeAdapter, ValidationError

from ostinato.infra.platform.errors import ConfigError, StorageError
from ostinato.infra.serving.gateway.config import Caller, IssuedKey

FILE_NAME = "gateway_tenants.json"
_KEYS = TypeAdapter(tuple[IssuedKey, ...])


class IssuedKeys:
    """The key file of a home. Readers see the old file or the whole new file."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE_NAME
        self._read_state: tuple[int, ...] | None = None
        self._by_digest: dict[str, IssuedKey] = {}

    def identify(self, api_key: str) -> IssuedKey | None:
        """The key's record in the current file. None when the key is unknown or revoked.

        StorageError when the file is damaged; keys of its earlier content are then refused too.
        """
        state = self._file_state()
        if state != self._read_state:
            try:
                keys = self.read()
            except ConfigError as error:
                raise StorageError(str(error)) from error  # not the caller's fault
            self._by_digest = {key.digest: key for key in keys if key.revoked_at is None}
            self._read_state = state
        return self._by_digest.get(digest_of(api_key))

    def read(self) -> tuple[IssuedKey, ...]:
        """All keys, oldest first, revoked ones too."""
        try:
            return _KEYS.validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return ()
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the file"
            raise ConfigError(
                f"{self._path}: {where}: {first['msg']}; restore it, or delete it and issue keys anew"
            ) from error

    def issue(self, caller: Caller, now: float) -> tuple[IssuedKey, str]:
        """A new key: its record, and its text."""
        text = f"ostinato-{secrets.token_urlsafe(24)}"
        with self._locked_writer() as write:
            keys = self.read()
            key = IssuedKey(
                **caller.model_dump(),
                key_id=secrets.token_hex(6),
                digest=digest_of(text),
                created_at=now,
            )
            write((*keys, key))
        return key, text

    def revoke(self, key_id: str, now: float) -> IssuedKey:
        """Revokes a key. ConfigError for an unknown id. An already revoked key stays as it is."""
        with self._locked_writer() as write:
            keys = self.read()
            found = next((key for key in keys if key.key_id == key_id), None)
            if found is None:
                known = ", ".join(key.key_id for key in keys if key.revoked_at is None) or "none"
                raise ConfigError(f"key id is {key_id!r}, wanted one of {known}")
            if found.revoked_at is not None:
                return found
            revoked = found.model_copy(update={"revoked_at": now})
            write(tuple(revoked if key is found else key for key in keys))
        return revoked

    def _file_state(self) -> tuple[int, ...] | None:
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size

    @contextmanager
    def _locked_writer(self) -> Iterator[Callable[[tuple[IssuedKey, ...]], None]]:
        """Holds the file's lock for the length of the block, and gives a function that replaces the keys."""
        with locked(self._path):
            yield lambda keys: write_private(self._path, _KEYS.dump_json(keys, indent=1))


def digest_of(api_key: str) -> str:
    """SHA-256 of a key. Keys have 192 random bits, so no slow password hash is needed."""
    return hashlib.sha256(api_key.encode()).hexdigest()


def locked(path: Path) -> FileLock:
    """The lock of a file, which need not exist yet, closed to other users. Creates its folder when needed."""
    return FileLock(path.with_name(f".{path.name}.lock"), mode=0o600, fallback_to_soft=False)


def write_private(path: Path, data: bytes) -> None:
    """Replaces a file, readable by its owner alone, and flushes it to disk before it returns."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
