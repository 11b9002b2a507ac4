"""Uploads of tenants: on disk, with one folder per tenant and upload, and as sandboxes, which are opened when first
needed, few at a time. Only the gateway's user can read them.

An upload is written to a temporary folder, then renamed, so readers never see part of it. The
modification time of its manifest is the time of its last use.
"""

import asyncio
import hashlib
import os
import re
import secrets
import shutil
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

from ostinato.infra.platform.errors import CapacityExhausted, StorageError
from ostinato.infra.platform.folders import read_folder
from ostinato.infra.platform.record import Record
from ostinato.infra.sandbox.discovery.checkout import describe_checkout
from ostinato.infra.sandbox.environment import RepositoryEnvironment
from ostinato.infra.sandbox.protocol import SandboxKind
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.infra.serving.gateway.failures import ApiError
from ostinato.infra.serving.gateway.uploads.archive import unpack_repository
from ostinato.infra.serving.gateway.uploads.expiry import HOUR_SECONDS, MANIFEST, expired, last_used

MAX_UPLOADS = 100  # per tenant
MAX_OPEN = 8  # each holds its files in memory, and a warm box for its tests
MAX_OPEN_PER_TENANT = 4
MAX_SENDING = 2  # archives that one tenant sends at once
_WAIT_SECONDS = 5.0
_Key = tuple[str, str]  # tenant and upload
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
    """The uploads of a home. Several gateways may use it at once."""

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
        """A new empty file for an incoming archive, deleted after the block."""
        with _on_disk():
            path = self._folder(tenant) / f".archive-{secrets.token_hex(8)}"
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def keep(self, tenant: str, archive: Path) -> Upload:
        """Unpacks an archive of a tenant. ApiError when it is invalid or exceeds the tenant's quota."""
        with _on_disk():
            for path in list(expired(self._directory, self._hours, self._wall_clock())):
                _remove(path)
            held = self.list(tenant)
            used = sum(upload.disk_bytes for upload in held)
            if len(held) >= MAX_UPLOADS or used >= self._bytes_per_tenant:
                raise self._quota_exceeded(used, len(held))
            upload_id = f"repo-{secrets.token_hex(16)}"
            partial = self._folder(tenant) / f".partial-{upload_id}"
            partial.mkdir(mode=0o700)
            try:
                upload = self._fill(partial, upload_id, archive)
                if used + upload.disk_bytes > self._bytes_per_tenant:
                    raise self._quota_exceeded(used + upload.disk_bytes, len(held) + 1)
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
        """Restarts an upload's time until expiry. An upload that is already gone is no error."""
        now = self._wall_clock()
        with suppress(FileNotFoundError):
            os.utime(self._folder(tenant) / upload_id / MANIFEST, (now, now))

    def repository(self, tenant: str, upload_id: str) -> PreparedRepository:
        """An upload as the repository of a box."""
        return PreparedRepository.load(self._folder(tenant) / upload_id)

    def remove(self, tenant: str, upload_id: str) -> None:
        """Removes an upload. An upload that is already gone is no error."""
        _remove(self._folder(tenant) / upload_id)

    def _fill(self, partial: Path, upload_id: str, archive: Path) -> Upload:
        found = unpack_repository(archive, partial / "files")
        layout = describe_checkout(read_folder(partial / "files"))
        for path, text in layout.generated_files.items():
            (partial / "files" / path).write_text(text)
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
        """The folder of a tenant, created when needed. Its name is a hash: tenants' names may hold any character."""
        folder = self._directory / hashlib.sha256(tenant.encode()).hexdigest()[:32]
        for path in (self._directory, folder):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder

    def _quota_exceeded(self, used: int, number: int) -> ApiError:
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
    """Renames an upload first, so that readers never see part of it, then deletes it."""
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


class Uploads:
    """Uploads of all tenants of one gateway. Belongs to one event loop."""

    def __init__(
        self,
        store: UploadStore,
        *,
        boxes_per_repository: int = 1,
        sandbox: SandboxKind = SandboxKind.NAMESPACE,
    ) -> None:
        self.store = store
        self._boxes, self._sandbox = boxes_per_repository, sandbox
        self._keeping = asyncio.Lock()  # one archive at a time: quotas hold, memory is bounded
        self._opening = asyncio.Lock()
        self._open: OrderedDict[_Key, RepositoryEnvironment] = OrderedDict()
        self._users: Counter[_Key] = Counter()
        self._sending: Counter[str] = Counter()

    @contextmanager
    def temporary_archive(self, tenant: str) -> Iterator[Path]:
        """A file for an archive that a tenant sends, deleted after the block."""
        if self._sending[tenant] >= MAX_SENDING:
            raise ApiError(
                429,
                f"this tenant is sending {MAX_SENDING} archives already, wanted at most "
                f"{MAX_SENDING} at once",
                code="too_many_uploads",
                retry_after_seconds=_WAIT_SECONDS,
            )
        self._sending[tenant] += 1
        try:
            with self.store.temporary_archive(tenant) as path:
                yield path
        finally:
            self._sending[tenant] -= 1

    async def keep(self, tenant: str, archive: Path) -> Upload:
        """Unpacks an archive that has arrived. ApiError when it is invalid or exceeds the quota."""
        async with self._keeping:
            return await asyncio.to_thread(self.store.keep, tenant, archive)

    async def remove(self, tenant: str, upload_id: str) -> None:
        """Removes an upload and its boxes. ApiError while an agent works on it."""
        async with self._opening:
            self._require(tenant, upload_id)
            if self._users[tenant, upload_id]:
                raise ApiError(
                    409,
                    f"an agent works on repository {upload_id}; wait for its answer",
                    code="repository_busy",
                )
            await self._close((tenant, upload_id))
            await asyncio.to_thread(self.store.remove, tenant, upload_id)

    @asynccontextmanager
    async def place(self, tenant: str, upload_id: str) -> AsyncIterator[RepositoryEnvironment]:
        """Boxes of an upload, which cannot be removed within the block. ApiError when the tenant has no such
        upload; CapacityExhausted when too many others are in use.
        """
        key = (tenant, upload_id)
        async with self._opening:
            self._require(tenant, upload_id)
            self.store.use(tenant, upload_id)
            if key not in self._open:
                await self._close_unused(tenant)
                self._open[key] = await self._start(tenant, upload_id)
            self._open.move_to_end(key)
            self._users[key] += 1
        try:
            yield self._open[key]
        finally:
            self._users[key] -= 1
            self.store.use(tenant, upload_id)

    async def close(self) -> None:
        """Closes all boxes."""
        for key in list(self._open):
            await self._close(key)

    def _require(self, tenant: str, upload_id: str) -> None:
        if self.store.find(tenant, upload_id) is None:
            raise ApiError(
                404,
                f"repository is {upload_id[:80]!r}, which this tenant does not have, or which expired; "
                "send it again",
                code="unknown_repository",
                param="repository",
            )

    async def _start(self, tenant: str, upload_id: str) -> RepositoryEnvironment:
        repository = self.store.repository(tenant, upload_id)
        await asyncio.to_thread(lambda: repository.files)  # read once, kept
        return RepositoryEnvironment.create(
            repository, self._boxes, self._sandbox, tests_may_write=True
        )

    async def _close_unused(self, tenant: str) -> None:
        """Closes the least recently used idle uploads above the limits: the tenant's, then those of all."""
        for owner, most in ((tenant, MAX_OPEN_PER_TENANT), (None, MAX_OPEN)):
            keys = [key for key in self._open if owner in (key[0], None)]
            if len(keys) < most:
                continue
            unused = next((key for key in keys if not self._users[key]), None)
            if unused is None:
                raise CapacityExhausted(f"{len(keys)} uploaded repositories are in use")
            await self._close(unused)

    async def _close(self, key: _Key) -> None:
        place = self._open.pop(key, None)
        if place is not None:
            await place.close()
