"""Commands and files of a box on any backend, as requests to the agent inside (inside/agent/agent.c)."""

import asyncio
import os
import struct
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, Protocol

from ostinato.infra.platform.errors import (
    InvalidArgument,
    OutputLimit,
    SandboxError,
    SandboxNotFound,
)
from ostinato.infra.sandbox.protocol import ExecResult, SandboxLimits

FILE_SECONDS = 20.0
MARGIN_SECONDS = 20.0  # after the time limit the box sends two signals, and the host may be loaded
_MAX_BATCH_BYTES = 96 << 20
_STATUS = struct.Struct(">cQI")
_ERRORS: dict[str, type[SandboxError]] = {
    "invalid": InvalidArgument,
    "not_found": SandboxNotFound,
    "output_limit": OutputLimit,
}

Blobs = tuple[bytes, ...]
Reply = tuple[dict[str, Any], list[bytes]]


class FileStatus(NamedTuple):
    """A path in a box. `kind`: f file, d folder, l link (not followed), o other."""

    path: str
    kind: str
    num_bytes: int


class Channel(Protocol):
    """Interface for requests to the agent in one box."""

    @property
    def name(self) -> str: ...

    @property
    def is_lost(self) -> bool: ...

    async def request(
        self, operation: str, answer_seconds: float, blobs: Blobs = (), **fields: Any
    ) -> Reply:
        """Sends a request and returns the reply.

        A reply with an `error` is raised as the error of `error_of_kind`. Raises SandboxLost if the box is gone.
        """
        ...


def error_of_kind(kind: str, message: str) -> SandboxError:
    """The exception for the kind of error in a reply."""
    return _ERRORS.get(kind, SandboxError)(message)


class BoxTools:
    """Commands and files of one box, with the methods of `Sandbox`."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._is_closed = False
        self._pausing = asyncio.Lock()

    @property
    def is_lost(self) -> bool:
        return self.channel.is_lost

    async def request(
        self, operation: str, answer_seconds: float, blobs: Blobs = (), **fields: Any
    ) -> Reply:
        """Sends a request to the agent inside, for a client in another process."""
        return await self.channel.request(operation, answer_seconds, blobs, **fields)

    async def hello(self, limits: SandboxLimits, seconds: float) -> None:
        """Waits until the agent answers, and sets the limits of processes."""
        await self.channel.request(
            "hello",
            seconds,
            process_memory_bytes=limits.process_memory_bytes,
            processes=limits.processes,
        )

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Stops all processes of the box for a `with` block. A machine copied in the block needs a `resume` request."""
        async with self._pausing:
            await self.channel.request("pause", FILE_SECONDS)
            try:
                yield
            finally:
                await self.channel.request("resume", FILE_SECONDS)

    async def exec(
        self,
        command: str,
        timeout_seconds: float,
        output_cap_bytes: int = 16_384,
        *,
        stdin: bytes = b"",
    ) -> ExecResult:
        if timeout_seconds <= 0 or output_cap_bytes < 0 or "\0" in command:
            raise InvalidArgument(
                f"exec in {self.channel.name}: timeout is {timeout_seconds} s and output cap "
                f"{output_cap_bytes} bytes, wanted more than 0, at least 0 and no zero byte in "
                f"{command[:80]!r}"
            )
        reply, (output,) = await self.channel.request(
            "exec",
            timeout_seconds + MARGIN_SECONDS,
            blobs=(os.fsencode(command), stdin),
            timeout_seconds=float(timeout_seconds),
            output_cap_bytes=output_cap_bytes,
        )
        return ExecResult(
            exit_code=reply["exit_code"],
            output=output,
            truncated=bool(reply["truncated"]),
            timed_out=bool(reply["timed_out"]),
            wall_seconds=reply["wall_seconds"],
        )

    async def read(self, path: str) -> bytes:
        (answer,) = await self.read_files((path,))
        if isinstance(answer, SandboxError):
            raise answer
        return answer

    async def write(self, path: str, content: bytes) -> None:
        for error in (await self.write_files({path: content})).values():
            raise error

    async def list(self, path: str = ".") -> tuple[str, ...]:
        statuses = [status for status in await self.list_files(path) if status[0] != "__pycache__"]
        return tuple(sorted(name + ("/" if kind == "d" else "") for name, kind, _ in statuses))

    async def read_files(self, paths: Sequence[str]) -> tuple[bytes | SandboxError, ...]:
        """Contents of many files in one round trip, in their order. A file that cannot be read gives its error."""
        reply, blobs = await self.channel.request("read", FILE_SECONDS, blobs=_paths(paths))
        answers = zip(paths, reply["kinds"], blobs, strict=True)
        return tuple(
            self._item_error("read", path, kind, blob) if kind else blob
            for path, kind, blob in answers
        )

    async def write_files(self, files: Mapping[str, bytes | None]) -> dict[str, SandboxError]:
        pairs = [
            (path, content or b"")
            for path, content in zip(_paths(files), files.values(), strict=True)
        ]
        num_bytes = sum(len(content) for _, content in pairs)
        if num_bytes > _MAX_BATCH_BYTES:
            raise InvalidArgument(
                f"write to {self.channel.name}: {num_bytes} bytes in one batch, "
                f"at most {_MAX_BATCH_BYTES}"
            )
        reply, messages = await self.channel.request(
            "write",
            FILE_SECONDS,
            blobs=tuple(part for pair in pairs for part in pair),
            removed=[int(content is None) for content in files.values()],
        )
        answers = zip(files, reply["kinds"], messages, strict=True)
        return {
            path: self._item_error("write", path, kind, message)
            for path, kind, message in answers
            if kind
        }

    async def list_files(self, path: str = ".", *, max_depth: int = 1) -> tuple[FileStatus, ...]:
        """Entries below a folder, sorted by path. Raises OutputLimit over 20,000."""
        _, blobs = await self.channel.request(
            "list", FILE_SECONDS, blobs=_paths((path,)), max_depth=max_depth
        )
        return tuple(sorted(_unpack(blobs[0])))

    def _item_error(self, operation: str, path: str, kind: str, message: bytes) -> SandboxError:
        text = message.decode(errors="replace")
        return error_of_kind(kind, f"{operation} {path!r} in {self.channel.name}: {text}")


def _paths(paths: Iterable[str]) -> Blobs:
    return tuple(_path(path) for path in paths)


def _path(path: str) -> bytes:
    if not path or "\0" in path:
        raise InvalidArgument(f"path {path!r}: wanted at least one character and no zero bytes")
    return os.fsencode(path)


def _unpack(packed: bytes) -> list[FileStatus]:
    statuses, place = [], 0
    while place < len(packed):
        kind, num_bytes, length = _STATUS.unpack_from(packed, place)
        place += _STATUS.size
        path = os.fsdecode(packed[place : place + length])
        place += length
        statuses.append(FileStatus(path, kind.decode(), num_bytes))
    return statuses
