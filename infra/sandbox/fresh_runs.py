"""Test runs in boxes that hold no other state of the repository than the run's own.

`FreshRuns`: for what an agent may see, and for repositories whose conftest.py must be imported with
the change in place. The box has no product code, and for runs that an agent sees no test modules
either; each run brings both (inside/fresh_server.py).
"""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ostinato.infra.platform.errors import SandboxLost
from ostinato.infra.sandbox.host.box import REPOSITORY_PATH, BoxProcess
from ostinato.infra.sandbox.host.channel import BoxChannel
from ostinato.infra.sandbox.host.system import blank_out
from ostinato.infra.sandbox.host.tools import Blobs
from ostinato.infra.sandbox.protocol import SandboxLimits
from ostinato.infra.sandbox.repository import PreparedRepository

QUEUE_SECONDS = 600.0
_MARK_OF_A_TEST = b"def test"


class RunBoxes(ABC):
    """Boxes for test runs of one repository. A box has one run at a time, so that no run meets another's
    processes or scratch files. A lost box is replaced. Belongs to one event loop.
    """

    def __init__(
        self, repository: PreparedRepository, limits: SandboxLimits, parallel_runs: int
    ) -> None:
        self.repository = repository
        self._limits = limits
        self._turns = asyncio.Semaphore(parallel_runs)
        self._idle: list[BoxChannel] = []
        self._open: list[BoxChannel] = []

    async def start(self) -> None:
        """Starts a box ahead of the first run. Runs start boxes as they need them."""
        if not self._open:
            self._idle.append(await self._start_box())

    async def close(self) -> None:
        """End the boxes."""
        self._idle.clear()
        while self._open:
            await self._open.pop().close()

    @abstractmethod
    async def _start_box(self) -> BoxChannel:
        """A new box that is open."""

    async def _open_box(
        self, box: BoxProcess, blobs: Blobs = (), **fields: Any
    ) -> tuple[BoxChannel, dict[str, Any]]:
        """The channel to a box, with its reply to being opened."""
        channel = BoxChannel(box)
        try:
            reply, _ = await channel.request(
                "open",
                self._limits.start_seconds,
                blobs,
                limits=self._limits.model_dump(),
                **fields,
            )
        except BaseException:
            await channel.close()
            raise
        self._open.append(channel)
        return channel, reply

    async def _request_run(
        self,
        files: Mapping[str, bytes],
        test_ids: Sequence[str],
        time_limit_seconds: float,
        **fields: Any,
    ) -> dict[str, Any]:
        """The reply to a run, tried again once in a new box. SandboxLost when that is lost too."""
        async with self._turns:
            for attempt in (1, 2):
                channel = self._idle.pop() if self._idle else await self._start_box()
                is_spent = True  # a run that is given up goes on in its box
                try:
                    reply, _ = await channel.request(
                        "run",
                        QUEUE_SECONDS + time_limit_seconds,
                        tuple(files.values()),
                        time_limit_seconds=time_limit_seconds,
                        tests=list(test_ids),
                        paths=list(files),
                        **fields,
                    )
                    is_spent = reply["spent"]
                    return reply
                except SandboxLost:
                    if attempt == 2:
                        raise
                finally:
                    await self._give_back(channel, is_spent)
        raise AssertionError("unreachable")

    async def _give_back(self, channel: BoxChannel, is_spent: bool) -> None:
        """`is_spent`: a run left behind what could not be removed."""
        if channel.is_lost or is_spent:
            await self._discard(channel)
        else:
            self._idle.append(channel)

    async def _discard(self, channel: BoxChannel) -> None:
        with contextlib.suppress(ValueError):  # `close` has it already
            self._open.remove(channel)
        await channel.close()


class FreshRuns(RunBoxes):
    """Boxes for runs that bring their own files."""

    def __init__(
        self,
        repository: PreparedRepository,
        limits: SandboxLimits,
        parallel_runs: int,
        *,
        hides_tests: bool,
    ) -> None:
        """`hides_tests`: whether files that hold tests, or look like them, are blank on the disk of the box."""
        super().__init__(repository, limits, parallel_runs)
        self._hides_tests = hides_tests

    async def run(
        self, files: Mapping[str, bytes], test_ids: Sequence[str], time_limit_seconds: float
    ) -> dict[str, Any]:
        """The box's reply to a run of tests on `files` alone. SandboxLost when the box died twice."""
        sources = {path: text for path, text in files.items() if path.endswith(".py")}
        return await self._request_run(sources, test_ids, time_limit_seconds)

    async def _start_box(self) -> BoxChannel:
        paths = self.repository.files if self._hides_tests else ()
        tests = [path for path in paths if self._holds_tests(path)]
        mounts = blank_mounts(self.repository, tests)
        box = BoxProcess(self._limits, mounts, server="fresh_server")
        channel, _ = await self._open_box(box)
        return channel

    def _holds_tests(self, path: str) -> bool:
        is_code = self.repository.is_test(path) and path.endswith(".py")
        is_marked = _MARK_OF_A_TEST in self.repository.files[path]
        return is_code and (is_marked or bool(self.repository.collection_rules))


def blank_mounts(repository: PreparedRepository, others: Collection[str] = ()) -> tuple[str, ...]:
    """The repository, read-only, with product code and `others` blanked out."""
    blank = [path for path in repository.files if repository.is_editable(path) or path in others]
    return blank_out(repository.directory.resolve(), blank, REPOSITORY_PATH)
