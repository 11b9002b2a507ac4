"""The bubblewrap sandbox an agent works in.

`NamespaceSandbox`: a box that is filled from memory and put back in milliseconds, so that one box
serves many attempts (the sandboxes that can be forked are in layered.py). It does not judge them
and runs no tests.
"""

from collections.abc import Mapping
from typing import Self

from ostinato.infra.sandbox.box import BoxProcess
from ostinato.infra.sandbox.channel import BoxChannel
from ostinato.infra.sandbox.protocol import SandboxLimits
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.infra.sandbox.tools import FILE_SECONDS, BoxTools


class NamespaceSandbox(BoxTools):
    """One box; make it with `open`. Belongs to the event loop that opened it."""

    def __init__(
        self, repository: PreparedRepository, box: BoxProcess, channel: BoxChannel
    ) -> None:
        super().__init__(channel)
        self.repository = repository
        self._box = box
        self._channel = channel

    @classmethod
    async def open(
        cls, repository: PreparedRepository, limits: SandboxLimits | None = None
    ) -> Self:
        """Start a box whose /repo is the pristine repository."""
        limits = limits or SandboxLimits()
        box = BoxProcess("file_server", limits)
        channel = BoxChannel(box)
        sandbox = cls(repository, box, channel)
        files = repository.files
        try:
            await channel.request(
                "open",
                limits.start_seconds,
                blobs=tuple(files.values()),
                paths=list(files),
                limits=limits.model_dump(),
            )
        except BaseException:
            await channel.close()
            raise
        return sandbox

    def count_memory_kills(self) -> int:
        """How often the kernel ended a process of this box for memory."""
        return self._box.count_memory_kills()

    async def diff(self) -> dict[str, bytes | None]:
        """Files that differ from the pristine repository; None: removed."""
        reply, blobs = await self._channel.request("diff", FILE_SECONDS)
        changes: dict[str, bytes | None] = dict(zip(reply["paths"], blobs, strict=True))
        changes.update(dict.fromkeys(reply["removed"]))
        return changes

    async def reset(self, files: Mapping[str, bytes | None] | None = None) -> None:
        """End every process, empty /tmp, and put back the pristine repository with `files` laid
        over it.
        """
        given = files or {}
        kept = {path: content for path, content in given.items() if content is not None}
        await self._channel.request(
            "reset",
            FILE_SECONDS,
            blobs=tuple(kept.values()),
            paths=list(kept),
            removed=[path for path, content in given.items() if content is None],
        )

    async def close(self) -> None:
        """End the box."""
        await self._channel.close()
