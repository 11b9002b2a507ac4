"""Sandboxes of uploaded repositories, opened when first needed, few at a time."""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from ostinato.infra.platform.errors import CapacityExhausted
from ostinato.infra.sandbox.environment import RepositoryEnvironment
from ostinato.infra.sandbox.protocol import SandboxKind
from ostinato.infra.serving.gateway.failures import ApiError
from ostinato.infra.serving.gateway.uploads.store import Upload, UploadStore

MAX_OPEN = 8  # each holds its files in memory, and a warm box for its tests
MAX_OPEN_PER_TENANT = 4
MAX_SENDING = 2  # archives of one tenant on their way in
_WAIT_SECONDS = 5.0
_Key = tuple[str, str]  # tenant and upload


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
        self._keeping = asyncio.Lock()  # so that quotas hold, and memory is taken once
        self._opening = asyncio.Lock()
        self._open: OrderedDict[_Key, RepositoryEnvironment] = OrderedDict()
        self._users: Counter[_Key] = Counter()
        self._sending: Counter[str] = Counter()

    @contextmanager
    def temporary_archive(self, tenant: str) -> Iterator[Path]:
        """A file for an archive that a tenant sends, gone after the block."""
        if self._sending[tenant] >= MAX_SENDING:
            raise ApiError(
                429,
                f"{MAX_SENDING} archives of this tenant are on their way, wanted at most "
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
        """Unpacks an archive that has arrived. ApiError when it is no good."""
        async with self._keeping:
            return await asyncio.to_thread(self.store.keep, tenant, archive)

    async def remove(self, tenant: str, upload_id: str) -> None:
        """Forgets an upload. ApiError while an agent works on it."""
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

    async def pristine(self, tenant: str, upload_id: str) -> Mapping[str, bytes]:
        """Every file as it was sent."""
        async with self.place(tenant, upload_id) as place:
            return place.repository.files

    @asynccontextmanager
    async def place(self, tenant: str, upload_id: str) -> AsyncIterator[RepositoryEnvironment]:
        """Boxes of an upload, which is not removed within the block. ApiError for one that this tenant does
        not have; CapacityExhausted when too many others are in use.
        """
        key = (tenant, upload_id)
        async with self._opening:
            self._require(tenant, upload_id)
            self.store.use(tenant, upload_id)
            if key not in self._open:
                await self._make_room(tenant)
                self._open[key] = await self._start(tenant, upload_id)
            self._open.move_to_end(key)
            self._users[key] += 1
        try:
            yield self._open[key]
        finally:
            self._users[key] -= 1
            self.store.use(tenant, upload_id)

    async def close(self) -> None:
        """Ends all boxes."""
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
        return RepositoryEnvironment.create(repository, self._boxes, self._sandbox)

    async def _make_room(self, tenant: str) -> None:
        """Closes the least recently used ones that no agent works on, of the tenant's own first."""
        for owner, most in ((tenant, MAX_OPEN_PER_TENANT), (None, MAX_OPEN)):
            keys = [key for key in self._open if owner in (key[0], None)]
            if len(keys) < most:
                continue
            unused = next((key for key in keys if not self._users[key]), None)
            if unused is None:
                raise CapacityExhausted(f"{len(keys)} uploaded repositories are at work")
            await self._close(unused)

    async def _close(self, key: _Key) -> None:
        place = self._open.pop(key, None)
        if place is not None:
            await place.close()
