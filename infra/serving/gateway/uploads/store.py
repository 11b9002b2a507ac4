"""Uploads on disk: one folder per tenant, in it one per upload. Only the gateway's user can read them.

An upload is written beside its place and renamed into it, so readers never see a part of one. The
modification time of its manifest is the time of its last use.
"""

import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ostinato.infra.platform.errors import StorageError
from ostinato.infra.platform.record import Record
from ostinato.infra.sandbox.layout import guess_layout
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.infra.serving.gateway.failures import ApiError
from ostinato.infra.serving.gateway.uploads.archive import unpack_repository
from ostinato.infra.serving.gateway.uploads.expiry import HOUR_SECONDS, MANIFEST, expired, last_used

MAX_UPLOADS = 100  # of one tenant
_ID = re.compile(r"repo-[0-9a-f]{32}")


class Upload(Record):
    """One uploaded repository."""

    upload_id: str
    created_at: float
    num_files: int
    disk_bytes: int
    package_paths: tuple[str, ...]
    test_paths: tuple[str, ...]


class UploadStore:
    """The uploads of a home. Several gateways may have it open."""

    def __init__(
        self,
        directory: Path,
        *,
        hours: float,
        bytes_per_tenant: int,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`hours`: an upload that is not used for this long expires."""
        self._directory, self._hours = directory, hours
        self._bytes_per_tenant, self._wall_clock = bytes_per_tenant, wall_clock

    @contextmanager
    def temporary_archive(self, tenant: str) -> Iterator[Path]:
        """A new empty file for an archive on its way in, gone after the block."""
        with _on_disk():
            path = self._folder(tenant) / f".archive-{secrets.token_hex(8)}"
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def keep(self, tenant: str, archive: Path) -> Upload:
        """Unpacks an archive of a tenant. ApiError when it is no good, or takes more than is left."""
        with _on_disk():
            self._remove_expired()
            held = self.list(tenant)
            used = sum(upload.disk_bytes for upload in held)
            if len(held) >= MAX_UPLOADS or used >= self._bytes_per_tenant:
                raise self._quota(used, len(held))
            upload_id = f"repo-{secrets.token_hex(16)}"
            partial = self._folder(tenant) / f".partial-{upload_id}"
            partial.mkdir(mode=0o700)
            try:
                upload = self._fill(partial, upload_id, archive)
                if used + upload.disk_bytes > self._bytes_per_tenant:
                    raise self._quota(used + upload.disk_bytes, len(held) + 1)
                partial.rename(partial.with_name(upload_id))
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            return upload

    def list(self, tenant: str) -> tuple[Upload, ...]:
        """A tenant's uploads, oldest first."""
        found = [self.find(tenant, path.name) for path in self._folder(tenant).glob("repo-*")]
        return tuple(sorted(filter(None, found), key=lambda upload: upload.created_at))

    def find(self, tenant: str, upload_id: str) -> Upload | None:
        """A tenant's upload. None for another tenant's, an expired one and an invalid id."""
        if not _ID.fullmatch(upload_id):
            return None
        path = self._folder(tenant) / upload_id
        if self.expires_at(tenant, upload_id) < self._wall_clock():
            return None
        try:
            return Upload.model_validate_json((path / MANIFEST).read_bytes())
        except FileNotFoundError:
            return None

    def expires_at(self, tenant: str, upload_id: str) -> float:
        """When an upload expires unless it is used before, in seconds since 1970."""
        return last_used(self._folder(tenant) / upload_id) + self._hours * HOUR_SECONDS

    def use(self, tenant: str, upload_id: str) -> None:
        """Keeps an upload for its whole time from now on. One that is gone already is no error."""
        now = self._wall_clock()
        with suppress(FileNotFoundError):
            os.utime(self._folder(tenant) / upload_id / MANIFEST, (now, now))

    def repository(self, tenant: str, upload_id: str) -> PreparedRepository:
        """An upload as boxes take it."""
        return PreparedRepository.load(self._folder(tenant) / upload_id)

    def remove(self, tenant: str, upload_id: str) -> None:
        """Removes an upload. One that is gone already is no error."""
        _remove(self._folder(tenant) / upload_id)

    def _fill(self, partial: Path, upload_id: str, archive: Path) -> Upload:
        found = unpack_repository(archive, partial / "files")
        layout = guess_layout(found.files)
        repository = PreparedRepository.from_directory(
            upload_id, partial / "files", layout.package_paths, layout.test_paths
        )
        repository.save()
        upload = Upload(
            upload_id=upload_id,
            created_at=self._wall_clock(),
            num_files=len(found.files),
            disk_bytes=found.disk_bytes,
            package_paths=layout.package_paths,
            test_paths=layout.test_paths,
        )
        manifest = partial / MANIFEST
        manifest.write_text(upload.model_dump_json())
        os.utime(manifest, (upload.created_at, upload.created_at))
        for path in (manifest, partial / "repository.json"):
            path.chmod(0o600)
        return upload

    def _folder(self, tenant: str) -> Path:
        """The folder of a tenant, made when needed. Hashed: a tenant's name may hold any character."""
        folder = self._directory / hashlib.sha256(tenant.encode()).hexdigest()[:32]
        for path in (self._directory, folder):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder

    def _remove_expired(self) -> None:
        for path in list(expired(self._directory, self._hours, self._wall_clock())):
            _remove(path)

    def _quota(self, used: int, number: int) -> ApiError:
        return ApiError(
            403,
            f"{number} repositories of this tenant take {used} bytes, wanted at most "
            f"{self._bytes_per_tenant} in {MAX_UPLOADS}; delete some, or wait until they expire",
            code="upload_quota_exceeded",
        )


@contextmanager
def _on_disk() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"folder of uploads: {error}") from error


def _remove(path: Path) -> None:
    """Renames an upload first, so that readers never see a part of one, then deletes it."""
    if path.is_dir() and not path.name.startswith("."):
        gone = path.with_name(f".removed-{path.name}-{secrets.token_hex(4)}")
        try:
            path = path.rename(gone)
        except FileNotFoundError:
            return
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
