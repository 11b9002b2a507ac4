"""The bubblewrap sandbox an agent works in.

Owns `NamespaceSandbox`: the async operations of the `Sandbox` protocol over a box's file server.
Enters: a prepared repository. Leaves: command results and changed files. It does not judge them and
runs no tests (see test_server.py).
"""

from collections.abc import Mapping
from typing import Self

from infra.sandbox.box import BoxProcess
from infra.sandbox.channel import BoxChannel
from infra.sandbox.protocol import ExecResult, SandboxLimits
from infra.sandbox.repository import PreparedRepository

_FILE_SECONDS = 20.0
_MARGIN_SECONDS = 5.0


class NamespaceSandbox:
    """One box; make it with `open`. Belongs to the event loop that opened it."""

    def __init__(self, repository: PreparedRepository, channel: BoxChannel) -> None:
        self.repository = repository
        self._channel = channel

    @classmethod
    async def open(
        cls, repository: PreparedRepository, limits: SandboxLimits | None = None
    ) -> Self:
        """Start a box whose /repo is the pristine repository."""
        limits = limits or SandboxLimits()
        channel = BoxChannel(BoxProcess("file_server", limits))
        sandbox = cls(repository, channel)
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

    @property
    def is_lost(self) -> bool:
        """Whether the box died; every operation then raises SandboxLost."""
        return self._channel.is_lost

    async def exec(
        self, command: str, timeout_seconds: float, output_cap_bytes: int = 16_384
    ) -> ExecResult:
        """Run a shell command in /repo.

        On time-out its process group is ended and what it printed is kept.
        """
        reply, blobs = await self._channel.request(
            "exec",
            timeout_seconds + _MARGIN_SECONDS,
            command=command,
            timeout_seconds=timeout_seconds,
            output_cap_bytes=output_cap_bytes,
        )
        return ExecResult(
            exit_code=reply["exit_code"],
            output=blobs[0],
            truncated=reply["truncated"],
            timed_out=reply["timed_out"],
            wall_seconds=reply["wall_seconds"],
        )

    async def read(self, path: str) -> bytes:
        """Content of a file, at most 8 MiB.

        SandboxError when it is not a readable file of the repository.
        """
        _, blobs = await self._channel.request("read", _FILE_SECONDS, path=path)
        return blobs[0]

    async def write(self, path: str, content: bytes) -> None:
        """Replace a file atomically; folders are made."""
        await self._channel.request("write", _FILE_SECONDS, blobs=(content,), path=path)

    async def list(self, path: str = ".") -> tuple[str, ...]:
        """Sorted names in a folder; folders end with a slash."""
        reply, _ = await self._channel.request("list", _FILE_SECONDS, path=path)
        return tuple(reply["names"])

    async def diff(self) -> dict[str, bytes | None]:
        """Files that differ from the pristine repository; None: removed."""
        reply, blobs = await self._channel.request("diff", _FILE_SECONDS)
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
            _FILE_SECONDS,
            blobs=tuple(kept.values()),
            paths=list(kept),
            removed=[path for path, content in given.items() if content is None],
        )

    async def close(self) -> None:
        """End the box."""
        await self._channel.close()
