"""What one can do in a running box, whatever runs the box: commands, sessions, jobs and files.

`BoxTools`, the host's side of the requests that inside/file_server.py and inside/agent.c answer. It
starts no box and knows no layers.
"""

import struct
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ostinato.infra.platform.errors import (
    InvalidArgument,
    OutputLimit,
    PreconditionFailed,
    SandboxBusy,
    SandboxError,
    SandboxNotFound,
    SandboxTimeout,
)
from ostinato.infra.sandbox.protocol import (
    ExecResult,
    FileKind,
    FileStatus,
    JobLogs,
    ReadRequest,
    WriteRequest,
)

FILE_SECONDS = 20.0
MARGIN_SECONDS = 20.0  # the box signals twice after the time limit, and the host may be loaded
_MAX_SESSION_COMMAND_BYTES = 48_000  # it goes through a pipe's 64 KiB, quoted
_MAX_BATCH_BYTES = 96 << 20
_STATUS = struct.Struct(">cBQqI")
_KINDS = {b"f": FileKind.FILE, b"d": FileKind.FOLDER, b"l": FileKind.LINK}
_ERRORS: dict[str, type[SandboxError]] = {
    "invalid": InvalidArgument,
    "not_found": SandboxNotFound,
    "busy": SandboxBusy,
    "output_limit": OutputLimit,
    "timeout": SandboxTimeout,
    "precondition": PreconditionFailed,
    "other": SandboxError,
}

Blobs = tuple[bytes, ...]
Messages = list[bytes]  # BoxTools has a method called list


class Channel(Protocol):
    """Requests to the server in one box."""

    @property
    def name(self) -> str: ...

    @property
    def is_lost(self) -> bool: ...

    async def request(
        self, operation: str, answer_seconds: float, blobs: Blobs = (), **fields: Any
    ) -> tuple[dict[str, Any], list[bytes]]:
        """Send and wait for the reply.

        A reply that names an `error` is raised, by `error_of_kind`; a box that is gone is
        SandboxLost.
        """
        ...


def error_of_kind(kind: str, message: str) -> SandboxError:
    """The error a box names in a reply."""
    return _ERRORS.get(kind, SandboxError)(message)


class BoxTools:
    """Commands and files of one box."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    @property
    def is_lost(self) -> bool:
        """Whether the box died; every operation then raises SandboxLost."""
        return self.channel.is_lost

    def count_memory_kills(self) -> int:
        """How often the kernel ended a process of this box for memory; 0 where nobody counts."""
        return 0

    async def exec(
        self,
        command: str | Sequence[str],
        timeout_seconds: float,
        output_cap_bytes: int = 16_384,
        *,
        directory: str = ".",
        environment: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        separate_stderr: bool = False,
    ) -> ExecResult:
        """Run a shell command (str) or a program with arguments (anything else) in /repo.

        On time-out its process group is ended and what it printed is kept.
        """
        if timeout_seconds <= 0 or output_cap_bytes < 0:
            raise InvalidArgument(
                f"exec in {self.channel.name}: timeout is {timeout_seconds} s and output cap "
                f"{output_cap_bytes} bytes, wanted more than 0 and at least 0"
            )
        blobs, counts = _command_blobs(command, directory, environment, stdin)
        kills_before = self.count_memory_kills()
        reply, outputs = await self.channel.request(
            "exec",
            timeout_seconds + MARGIN_SECONDS,
            blobs=blobs,
            timeout_seconds=float(timeout_seconds),
            output_cap_bytes=output_cap_bytes,
            separate=int(separate_stderr),
            **counts,
        )
        return self._result(reply, outputs, kills_before)

    async def open_session(
        self, *, directory: str = ".", environment: Mapping[str, str] | None = None
    ) -> str:
        """Start a shell that keeps its folder and variables; its id."""
        blobs = (_folder(directory), *_pairs(environment))
        reply, _ = await self.channel.request("session_open", FILE_SECONDS, blobs=blobs)
        return str(reply["session"])

    async def run_in_session(
        self, session_id: str, command: str, timeout_seconds: float, output_cap_bytes: int = 16_384
    ) -> ExecResult:
        """Run in a session, one command at a time (SandboxBusy)."""
        text = _encode(command)
        if len(text) + 3 * text.count(b"'") > _MAX_SESSION_COMMAND_BYTES:
            raise InvalidArgument(
                f"session {session_id}: a command of {len(text)} bytes, at most "
                f"{_MAX_SESSION_COMMAND_BYTES} with quoting; write a file and run it"
            )
        kills_before = self.count_memory_kills()
        reply, outputs = await self.channel.request(
            "session_run",
            timeout_seconds + MARGIN_SECONDS,
            blobs=(text,),
            session=_number(session_id, "session"),
            timeout_seconds=float(timeout_seconds),
            output_cap_bytes=output_cap_bytes,
        )
        return self._result(reply, outputs, kills_before)

    async def signal_session(self, session_id: str, signal_number: int) -> None:
        """Signal the shell and what it runs."""
        session = _number(session_id, "session")
        await self.channel.request(
            "session_signal", FILE_SECONDS, session=session, signal=signal_number
        )

    async def close_session(self, session_id: str) -> None:
        """End the shell and what it runs."""
        session = _number(session_id, "session")
        await self.channel.request("session_close", FILE_SECONDS, session=session)

    async def start_job(
        self,
        command: str | Sequence[str],
        *,
        directory: str = ".",
        environment: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> str:
        """Start a background job; its id."""
        blobs, counts = _command_blobs(command, directory, environment, stdin)
        reply, _ = await self.channel.request("job_start", FILE_SECONDS, blobs=blobs, **counts)
        return str(reply["job"])

    async def read_job_logs(
        self, job_id: str, offset_bytes: int = 0, max_bytes: int = 65_536
    ) -> JobLogs:
        """What a job printed from a place on; it keeps the last MiB."""
        reply, blobs = await self.channel.request(
            "job_logs",
            FILE_SECONDS,
            job=_number(job_id, "job"),
            offset=offset_bytes,
            length=max_bytes,
        )
        return _logs(reply, blobs[0])

    async def wait_job(self, job_id: str, timeout_seconds: float) -> JobLogs:
        """The first MiB that is kept of a job's output, once it has ended; else SandboxTimeout."""
        reply, blobs = await self.channel.request(
            "job_wait",
            timeout_seconds + MARGIN_SECONDS,
            job=_number(job_id, "job"),
            timeout_seconds=float(timeout_seconds),
            offset=0,
            length=1 << 20,
        )
        return _logs(reply, blobs[0])

    async def kill_job(self, job_id: str, signal_number: int = 9) -> None:
        """Signal a job and its group; nothing when it has ended."""
        job = _number(job_id, "job")
        await self.channel.request("job_kill", FILE_SECONDS, job=job, signal=signal_number)

    async def read(self, path: str) -> bytes:
        """Content of a file, at most 8 MiB."""
        return _one(await self.read_files((ReadRequest(path=path),)))

    async def write(self, path: str, content: bytes) -> None:
        """Replace a file atomically; folders are made."""
        _one(await self.write_files((WriteRequest(path=path, content=content),)))

    async def list(self, path: str = ".") -> tuple[str, ...]:
        """Sorted names in a folder; folders end with a slash."""
        return tuple(
            sorted(
                status.path + ("/" if status.kind is FileKind.FOLDER else "")
                for status in await self.list_files(path)
                if status.path != "__pycache__"
            )
        )

    async def read_files(self, requests: Sequence[ReadRequest]) -> tuple[bytes | SandboxError, ...]:
        """Many reads in one round trip, answered in their order; a failed one is its error."""
        reply, blobs = await self.channel.request(
            "read",
            FILE_SECONDS,
            blobs=tuple(_path(item.path) for item in requests),
            offsets=[item.offset_bytes for item in requests],
            lengths=[-1 if item.max_bytes is None else item.max_bytes for item in requests],
        )
        answers = zip(requests, reply["kinds"], blobs, strict=True)
        return tuple(
            self._item_error("read", item.path, kind, blob) if kind else blob
            for item, kind, blob in answers
        )

    async def write_files(
        self, requests: Sequence[WriteRequest]
    ) -> tuple[SandboxError | None, ...]:
        """Many writes in one round trip; each alone is atomic, they are not so together."""
        blobs: list[bytes] = []
        for item in requests:
            expected = {None: b"*", "": b"-"}.get(item.expected_sha256)
            if expected is None:
                assert item.expected_sha256 is not None
                expected = item.expected_sha256.encode()
            blobs += (_path(item.path), item.content, expected)
        if sum(map(len, blobs)) > _MAX_BATCH_BYTES:
            raise InvalidArgument(
                f"write to {self.channel.name}: {sum(map(len, blobs))} bytes in one batch, "
                f"at most {_MAX_BATCH_BYTES}"
            )
        executable = [int(item.is_executable) for item in requests]
        reply, messages = await self.channel.request(
            "write", FILE_SECONDS, blobs=tuple(blobs), executable=executable
        )
        return self._errors("write", [item.path for item in requests], reply, messages)

    async def list_files(self, path: str = ".", *, max_depth: int = 1) -> tuple[FileStatus, ...]:
        """What is below a folder, by path; OutputLimit over 20,000 entries."""
        _, blobs = await self.channel.request(
            "list", FILE_SECONDS, blobs=(_path(path),), max_depth=max_depth
        )
        return tuple(sorted(_unpack(blobs[0]), key=lambda status: status.path))

    async def stat(self, paths: Sequence[str]) -> tuple[FileStatus | None, ...]:
        """None: nothing there."""
        _, blobs = await self.channel.request(
            "stat", FILE_SECONDS, blobs=tuple(_path(path) for path in paths)
        )
        return tuple(_unpack(blob)[0] if blob else None for blob in blobs)

    async def remove(self, paths: Sequence[str]) -> tuple[SandboxError | None, ...]:
        """Remove files, links, and folders with all below them."""
        reply, messages = await self.channel.request(
            "remove", FILE_SECONDS, blobs=tuple(_path(path) for path in paths)
        )
        return self._errors("remove", paths, reply, messages)

    def _errors(
        self, operation: str, paths: Sequence[str], reply: dict[str, Any], messages: Messages
    ) -> tuple[SandboxError | None, ...]:
        answers = zip(paths, reply["kinds"], messages, strict=True)
        return tuple(
            self._item_error(operation, path, kind, message) if kind else None
            for path, kind, message in answers
        )

    def _item_error(self, operation: str, path: str, kind: str, message: bytes) -> SandboxError:
        text = message.decode(errors="replace")
        return error_of_kind(kind, f"{operation} {path!r} in {self.channel.name}: {text}")

    def _result(self, reply: dict[str, Any], outputs: Messages, kills_before: int) -> ExecResult:
        return ExecResult(
            exit_code=reply["exit_code"],
            output=outputs[0],
            stderr=outputs[1] if len(outputs) > 1 else b"",
            truncated=bool(reply["truncated"]),
            timed_out=bool(reply["timed_out"]),
            out_of_memory=self.count_memory_kills() > kills_before,
            wall_seconds=reply["wall_seconds"],
            cpu_seconds=reply["cpu_seconds"],
        )


def _command_blobs(
    command: str | Sequence[str],
    directory: str,
    environment: Mapping[str, str] | None,
    stdin: bytes,
) -> tuple[Blobs, dict[str, int]]:
    arguments = ("/bin/sh", "-c", command) if isinstance(command, str) else tuple(command)
    if not arguments or any("\0" in argument for argument in arguments):
        raise InvalidArgument(f"command {arguments!r}: wanted a program and no zero bytes")
    pairs = _pairs(environment)
    blobs = (_folder(directory), stdin, *map(_encode, arguments), *pairs)
    return blobs, {"arguments": len(arguments), "variables": len(pairs)}


def _pairs(environment: Mapping[str, str] | None) -> Blobs:
    for name in environment or {}:
        if not name or "=" in name or "\0" in name:
            raise InvalidArgument(
                f"environment: name {name!r}, wanted one without = and zero bytes"
            )
    return tuple(_encode(f"{name}={value}") for name, value in (environment or {}).items())


def _folder(directory: str) -> bytes:
    return (
        _path("/repo" if directory == "." else f"/repo/{directory}")
        if not directory.startswith("/")
        else _path(directory)
    )


def _path(path: str) -> bytes:
    if not path or "\0" in path:
        raise InvalidArgument(f"path {path!r}: wanted at least one character and no zero bytes")
    return _encode(path)


def _encode(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


def _number(text: str, what: str) -> int:
    if not text.isdecimal():
        raise SandboxNotFound(f"no {what} {text!r}")
    return int(text)


def _one(answers: tuple[Any, ...]) -> Any:
    if isinstance(answers[0], SandboxError):
        raise answers[0]
    return answers[0]


def _logs(reply: dict[str, Any], data: bytes) -> JobLogs:
    return JobLogs(
        data=data,
        offset_bytes=reply["offset"],
        next_offset_bytes=reply["offset"] + len(data),
        is_running=reply["exit_code"] is None,
        exit_code=reply["exit_code"],
    )


def _unpack(packed: bytes) -> list[FileStatus]:
    statuses, place = [], 0
    while place < len(packed):
        kind, executable, num_bytes, modified_ns, length = _STATUS.unpack_from(packed, place)
        place += _STATUS.size
        name = packed[place : place + length].decode(errors="replace")
        place += length
        statuses.append(
            FileStatus(
                path=name,
                kind=_KINDS.get(kind, FileKind.OTHER),
                num_bytes=num_bytes,
                modified_ns=modified_ns,
                is_executable=bool(executable),
            )
        )
    return statuses
