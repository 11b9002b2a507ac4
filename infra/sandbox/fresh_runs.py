"""Runs tests on files that the run alone has: its box never saw another state of the repository.

`FreshRuns`: for what an agent may see, and for repositories whose conftest.py must be imported with
the change in place. Neither product code nor a test module lies in the box; each run brings both
(inside/fresh_server.py).
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ostinato.infra.platform.errors import SandboxLost
from ostinato.infra.sandbox.host.box import REPOSITORY_PATH, BoxProcess
from ostinato.infra.sandbox.host.channel import BoxChannel
from ostinato.infra.sandbox.host.tools import Blobs
from ostinato.infra.sandbox.protocol import SandboxLimits
from ostinato.infra.sandbox.repository import PreparedRepository

QUEUE_SECONDS = 600.0
_BLANK = str(Path(__file__).parent / "inside" / "blank.py")
_MARK_OF_A_TEST = b"def test"


class FreshRuns:
    """A box for runs that bring their own files. Belongs to one event loop."""

    def __init__(
        self, repository: PreparedRepository, limits: SandboxLimits, parallel_runs: int
    ) -> None:
        self._repository = repository
        self._limits = limits
        self._parallel_runs = parallel_runs
        self._channel: BoxChannel | None = None
        self._starting = asyncio.Lock()

    async def run(
        self, files: Mapping[str, bytes], test_ids: Sequence[str], time_limit_seconds: float
    ) -> dict[str, Any]:
        """The box's reply to a run of tests on `files`, all there are. SandboxLost when the box
        died twice.
        """
        sources = {path: text for path, text in files.items() if path.endswith(".py")}
        return await request_run(
            self._open_channel,
            time_limit_seconds,
            blobs=tuple(sources.values()),
            tests=list(test_ids),
            paths=list(sources),
        )

    async def close(self) -> None:
        """End the box."""
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    async def _open_channel(self) -> BoxChannel:
        async with self._starting:
            if self._channel is not None and not self._channel.is_lost:
                return self._channel
            await self.close()
            tests = [path for path in self._repository.files if self._holds_tests(path)]
            mounts = blank_mounts(self._repository, tests)
            channel = BoxChannel(BoxProcess(self._limits, mounts, server="fresh_server"))
            try:
                await channel.request(
                    "open",
                    self._limits.start_seconds,
                    limits=self._limits.model_dump(),
                    parallel_runs=self._parallel_runs,
                )
            except BaseException:
                await channel.close()
                raise
            self._channel = channel
            return channel

    def _holds_tests(self, path: str) -> bool:
        is_code = self._repository.is_test(path) and path.endswith(".py")
        return is_code and _MARK_OF_A_TEST in self._repository.files[path]


async def request_run(
    open_channel: Callable[[], Awaitable[BoxChannel]],
    time_limit_seconds: float,
    blobs: Blobs,
    **fields: Any,
) -> dict[str, Any]:
    """The reply to a run in a box that many runs share: when another takes it down, this one gets a
    second try. SandboxLost when the box died twice.
    """
    for attempt in (1, 2):
        channel = await open_channel()
        try:
            reply, _ = await channel.request(
                "run",
                QUEUE_SECONDS + time_limit_seconds,
                blobs,
                time_limit_seconds=time_limit_seconds,
                **fields,
            )
            return reply
        except SandboxLost:
            if attempt == 2:
                raise
    raise AssertionError("unreachable")


def blank_mounts(repository: PreparedRepository, others: Collection[str] = ()) -> tuple[str, ...]:
    """The repository, read-only, with product code and `others` blanked out."""
    mounts = ["--ro-bind", str(repository.directory.resolve()), REPOSITORY_PATH]
    for path in repository.files:
        if repository.is_editable(path) or path in others:
            mounts += ["--ro-bind", _BLANK, f"{REPOSITORY_PATH}/{path}"]
    return tuple(mounts)
