"""Objects in an S3 bucket through s3fs. Listings are never cached, because other processes write too."""

import io
from pathlib import Path
from typing import IO, Any

import fsspec

from ostinato.infra.platform.settings import Settings

_CONNECT_TIMEOUT_SECONDS = 3
_READ_TIMEOUT_SECONDS = 30
_ATTEMPTS = 2
_BLOCK_BYTES = 4 << 20  # smallest read from an open object


class S3Backend:
    """The `s3://` backend. A put is one PUT, or one multipart upload completed at its end."""

    def __init__(self, bucket: str, prefix: str, settings: Settings) -> None:
        self._base = f"{bucket}/{prefix}".rstrip("/")
        secret = settings.s3_secret_access_key
        self._files = fsspec.filesystem(
            "s3",
            key=settings.s3_access_key_id,
            secret=secret.get_secret_value() if secret is not None else None,
            endpoint_url=settings.s3_endpoint_url,
            client_kwargs={"region_name": settings.s3_region} if settings.s3_region else {},
            config_kwargs={
                "connect_timeout": _CONNECT_TIMEOUT_SECONDS,
                "read_timeout": _READ_TIMEOUT_SECONDS,
                "retries": {"max_attempts": _ATTEMPTS},
            },
            use_listings_cache=False,
        )
        self._files.retries = _ATTEMPTS

    def write(self, key: str, data: bytes) -> None:
        self._files.pipe_file(self._path(key), data)

    def write_new(self, key: str, data: bytes) -> bool:
        try:
            self._files.pipe_file(self._path(key), data, mode="create")
        except FileExistsError:
            return False
        except OSError as error:
            if "PreconditionFailed" in str(error) or "pre-conditions" in str(error):
                return False
            raise
        return True

    def upload(self, key: str, path: Path) -> None:
        self._files.put_file(str(path), self._path(key))

    def read(self, key: str) -> bytes:
        return self._files.cat_file(self._path(key))

    def download(self, key: str, path: Path) -> None:
        self._files.get_file(self._path(key), str(path))

    def exists(self, key: str) -> bool:
        try:
            return self._files.info(self._path(key))["type"] == "file"
        except FileNotFoundError:
            return False

    def keys(self, prefix: str) -> list[str]:
        folder, _, stem = prefix.rpartition("/")
        root = f"{self._base}/{folder}" if folder else self._base
        found = self._files.find(root, prefix=stem)
        return sorted(path.removeprefix(self._base + "/") for path in found)

    def sizes(self, prefix: str) -> dict[str, int]:
        """Bytes by key of a folder, for prefixes that end with /."""
        return {key: int(info["size"]) for key, info in self._infos(prefix).items()}

    def changed_at(self, prefix: str) -> dict[str, float]:
        """Time of the last write of each object."""
        infos = self._infos(prefix)
        return {key: info["LastModified"].timestamp() for key, info in infos.items()}

    def _infos(self, prefix: str) -> dict[str, Any]:
        found = self._files.find(self._path(prefix.rstrip("/")), detail=True)
        return {path.removeprefix(self._base + "/"): info for path, info in found.items()}

    def versions(self, path: str, suffix: str) -> dict[str, str]:
        """ETags by key: of the object `path`, or of those below it that end in `suffix`."""
        return {
            key: info["ETag"].strip('"')
            for key, info in self._infos(path).items()
            if key == path or key.endswith(suffix)
        }

    def open(self, key: str) -> IO[bytes]:
        """A read fails when the object's ETag has changed since it was opened."""
        opened = self._files.open(self._path(key), "rb", block_size=_BLOCK_BYTES)
        return io.BufferedReader(opened)  # s3fs' own readline copies a whole block per line

    def remove(self, key: str) -> None:
        if self.exists(key):
            self._files.rm_file(self._path(key))

    def _path(self, key: str) -> str:
        return f"{self._base}/{key}"
