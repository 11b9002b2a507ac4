"""The rented sandboxes of one server: a pool of warm boxes, time limits, pauses, snapshots and forks."""

import asyncio
import itertools
import secrets
import shutil
import tempfile
import time
from collections import Counter, deque
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field

from ostinato.infra.platform.errors import SandboxError
from ostinato.infra.platform.record import Record
from ostinato.infra.sandbox.egress.config import EgressConfig
from ostinato.infra.sandbox.egress.door import Doors
from ostinato.infra.sandbox.host.backend import NamespaceBackend, NamespaceSandbox
from ostinato.infra.sandbox.host.box import REPOSITORY_PATH
from ostinato.infra.sandbox.host.tools import FILE_SECONDS
from ostinato.infra.sandbox.memory import key_of, prepare
from ostinato.infra.sandbox.protocol import SandboxLimits, SandboxSpec, Snapshot
from ostinato.infra.serving.sandboxes.guest import SOCKET, Guest, Refused

TEMPLATES = ("base", "default")


class SandboxServiceConfig(Record):
    """Settings of a server of sandboxes."""

    warm: int = Field(default=4, ge=0, description="boxes that wait for a renter")
    most: int = Field(default=64, ge=1, description="sandboxes at a time, paused ones included")
    most_seconds: float = Field(default=86_400.0, description="longest time limit of a sandbox")
    limits: SandboxLimits = SandboxLimits()
    egress: EgressConfig = EgressConfig()


@dataclass(eq=False)
class RentedSandbox:
    """A sandbox under its id. While it is paused, its processes are stopped and keep their memory."""

    template: str
    metadata: Mapping[str, str]
    variables: Mapping[str, str]  # of every command
    has_network: bool  # that of the server's settings
    pauses_at_end: bool  # in place of ending
    guest: Guest
    sandbox_id: str = field(default_factory=lambda: f"i{secrets.token_hex(10)}")
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    started_at: float = field(default_factory=time.time)
    ends_at: float = 0.0
    is_paused: bool = False
    timer: asyncio.TimerHandle | None = None
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def gone(self) -> str:
        """Message of a request to a sandbox that does not run. The SDK looks for "was not found"."""
        return f"sandbox {self.sandbox_id} was not found: it {'is paused' if self.is_paused else 'ended'}"


class SandboxService:
    """Sandboxes on this host. Belongs to one event loop."""

    def __init__(self, config: SandboxServiceConfig) -> None:
        self.config = config
        self.sandboxes: dict[str, RentedSandbox] = {}
        self.saved: dict[str, tuple[Snapshot, str]] = {}  # with the id of the sandbox
        self._uses: Counter[str] = Counter()  # of the backend's snapshots: equal files have one
        self._backend = NamespaceBackend()
        self._doors = Doors(config.egress) if config.egress.allow else None
        self._folder = Path(tempfile.mkdtemp(prefix="ostinato-sandboxes-"))
        # where programs for E2B expect their home
        self._home = prepare(
            "home", key_of(), lambda top: (top / "user").symlink_to(REPOSITORY_PATH)
        )
        self._numbers = itertools.count()
        self._warm: deque[Guest] = deque()
        self._num_starting = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._filling: asyncio.Task[None] | None = None

    async def fill(self) -> None:
        """Makes boxes until enough wait, one at a time."""
        while len(self._warm) < self.config.warm:
            self._warm.append(await self._start(None, has_network=True))

    async def create(
        self,
        template: str,
        seconds: float,
        *,
        metadata: Mapping[str, str],
        variables: Mapping[str, str],
        has_network: bool = True,
        pauses_at_end: bool = False,
    ) -> RentedSandbox:
        """A new sandbox, from the pool if one waits. `template`: one of TEMPLATES, or the id of a snapshot."""
        if template not in TEMPLATES and template not in self.saved:
            raise Refused(
                "not_found",
                f"template {template!r} was not found, wanted base or the id of a snapshot",
            )
        self._check_seconds(seconds)
        if (seen := len(self.sandboxes) + self._num_starting) >= self.config.most:
            raise Refused(
                "resource_exhausted", f"{seen} sandboxes exist, at most {self.config.most} may"
            )
        self._num_starting += 1
        try:
            guest = None
            while template not in self.saved and has_network and self._warm and guest is None:
                guest = self._warm.popleft()
                if guest.is_lost:
                    await guest.close()
                    guest = None
            if guest is None:
                source = self.saved[template][0] if template in self.saved else None
                guest = await self._start(source, has_network=has_network)
        finally:
            self._num_starting -= 1
        made = RentedSandbox(template, metadata, variables, has_network, pauses_at_end, guest)
        self.sandboxes[made.sandbox_id] = made
        guest.on_end = lambda: self.kill(made)
        self.set_timeout(made, seconds)
        if self._filling is None or self._filling.done():
            self._filling = self._spawn(self.fill())
        return made

    def find(self, sandbox_id: str) -> RentedSandbox:
        """A sandbox, paused or not."""
        if (found := self.sandboxes.get(sandbox_id)) is None:
            raise Refused("not_found", f"sandbox {sandbox_id} was not found")
        return found

    async def kill(self, sandbox: RentedSandbox) -> None:
        """Ends a sandbox and everything in it."""
        self.sandboxes.pop(sandbox.sandbox_id, None)
        if sandbox.timer is not None:
            sandbox.timer.cancel()
        sandbox.is_paused = False
        await sandbox.guest.end_streams(sandbox.gone)
        await sandbox.guest.close()

    def set_timeout(self, sandbox: RentedSandbox, seconds: float) -> None:
        """Sets the time until a sandbox ends."""
        self._check_seconds(seconds)
        if sandbox.timer is not None:
            sandbox.timer.cancel()
        sandbox.ends_at = time.time() + seconds
        loop = asyncio.get_running_loop()
        sandbox.timer = loop.call_later(seconds, lambda: self._spawn(self._expire(sandbox)))

    async def pause(self, sandbox: RentedSandbox) -> None:
        """Stops all processes of a sandbox. Refused if they are."""
        async with sandbox.changing:
            if sandbox.is_paused:
                raise Refused("already_exists", f"{sandbox.sandbox_id} is already paused")
            await sandbox.guest.sandbox.request("pause", FILE_SECONDS)
            sandbox.is_paused = True
            if sandbox.timer is not None:
                sandbox.timer.cancel()
            await sandbox.guest.end_streams(sandbox.gone)

    async def resume(self, sandbox: RentedSandbox, seconds: float) -> None:
        """Continues a paused sandbox. The time limit of one that runs is lengthened, never shortened."""
        async with sandbox.changing:
            if sandbox.is_paused:
                await sandbox.guest.sandbox.request("resume", FILE_SECONDS)
                sandbox.is_paused = False
            elif time.time() + seconds < sandbox.ends_at:
                return
            self.set_timeout(sandbox, seconds)

    async def save(self, sandbox: RentedSandbox) -> str:
        """The id of a snapshot of a sandbox's files."""
        async with sandbox.changing:
            if sandbox.is_paused:
                raise Refused(
                    "failed_precondition", f"{sandbox.sandbox_id} is paused; resume it first"
                )
            snapshot = await sandbox.guest.sandbox.snapshot()
        self._uses[snapshot.snapshot_id] += 1
        snapshot_id = f"snapshot-{secrets.token_hex(8)}"
        self.saved[snapshot_id] = (snapshot, sandbox.sandbox_id)
        return snapshot_id

    async def forget(self, snapshot_id: str) -> None:
        """Removes a snapshot. Sandboxes that started from it keep running."""
        if snapshot_id not in self.saved:
            raise Refused("not_found", f"snapshot {snapshot_id} was not found")
        snapshot, _ = self.saved.pop(snapshot_id)
        self._uses[snapshot.snapshot_id] -= 1
        if not self._uses[snapshot.snapshot_id]:
            await self._backend.remove_snapshot(snapshot)

    async def fork(
        self, sandbox: RentedSandbox, count: int, seconds: float
    ) -> list[RentedSandbox | Exception]:
        """New sandboxes with the files of a running one, or the error of each that did not start."""
        snapshot_id = await self.save(sandbox)
        made: list[RentedSandbox | Exception] = []
        for _ in range(count):
            try:
                twin = await self.create(
                    snapshot_id,
                    seconds,
                    metadata=sandbox.metadata,
                    variables=sandbox.variables,
                    has_network=sandbox.has_network,
                )
                made.append(twin)
            except (SandboxError, Refused) as error:
                made.append(error)
        await self.forget(snapshot_id)
        return made

    async def close(self) -> None:
        """Ends all boxes."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for sandbox in tuple(self.sandboxes.values()):
            await self.kill(sandbox)
        for guest in self._warm:
            await guest.close()
        await self._backend.close()
        if self._doors is not None:
            self._doors.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _check_seconds(self, seconds: float) -> None:
        if not 0 <= seconds <= self.config.most_seconds:
            raise Refused(
                "invalid_argument",
                f"timeout is {seconds} s, wanted 0 to {self.config.most_seconds:g}",
            )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _expire(self, sandbox: RentedSandbox) -> None:
        if not sandbox.pauses_at_end:
            await self.kill(sandbox)
        else:
            with suppress(Refused, SandboxError):  # it was paused, or ended, meanwhile
                await self.pause(sandbox)

    async def _start(self, source: Snapshot | None, *, has_network: bool) -> Guest:
        """A new box of the pool, or with a snapshot's files."""
        number, resources = next(self._numbers), AsyncExitStack()
        path = self._folder / f"{number}.sock"
        mounts: dict[str, Path] = {SOCKET: path, "/home": self._home}
        variables = {"HOME": "/home/user"}
        door = None
        if self._doors is not None and has_network:
            door = await resources.enter_async_context(
                self._doors.open(f"sandbox-{number}", (), [])
            )
            mounts |= door.mounts
            variables |= door.variables
        spec = SandboxSpec(mounts=mounts, variables=variables, limits=self.config.limits)

        async def make() -> NamespaceSandbox:
            if source is None:
                made = await self._backend.create(spec)
            else:
                (made,) = await self._backend.fork(source, spec=spec)
            resources.push_async_callback(made.close)
            if door is not None:
                await resources.enter_async_context(door.forwarded(made))
            return made

        return await Guest.start(make, path, resources)
