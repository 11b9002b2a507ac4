"""Processes that the server of a box starts: commands, shells that keep their state, background jobs.

Starting them (`start_process`), what they have printed (`HeadAndTail`, `Log`) and how they end. It
reads no socket and knows no requests: file_server.py does. Standard library only: this file runs
inside the box.
"""

import contextlib
import os
import resource
import signal
import time

GRACE_SECONDS = 0.5
LOG_BYTES = 1 << 20
STATUS_DESCRIPTOR = 9  # where a session's shell says how a command ended; commands do not have it
_SHELLS = ("/bin/bash", "/usr/bin/bash", "/bin/sh")


class HeadAndTail:
    """The first and the last half of what was printed."""

    def __init__(self, cap_bytes: int) -> None:
        self._half_bytes = cap_bytes // 2
        self._head = bytearray()
        self._tail = bytearray()
        self.dropped_bytes = 0

    def add(self, data: bytes) -> None:
        """Take more of it."""
        room = max(self._half_bytes - len(self._head), 0)
        self._head += data[:room]
        self._tail += data[room:]
        excess = len(self._tail) - self._half_bytes
        if excess > 0:
            self.dropped_bytes += excess
            del self._tail[:excess]

    def text(self) -> bytes:
        """Everything, or head and tail around a note."""
        if not self.dropped_bytes:
            return bytes(self._head + self._tail)
        note = f"\n[... {self.dropped_bytes} bytes left out ...]\n".encode()
        return bytes(self._head) + note + bytes(self._tail)


class Log:
    """The last LOG_BYTES of what was printed, by place in all of it."""

    def __init__(self) -> None:
        self._data = bytearray()
        self.offset_bytes = 0

    def add(self, data: bytes) -> None:
        """Take more of it."""
        self._data += data
        excess = len(self._data) - LOG_BYTES
        if excess > 0:
            self.offset_bytes += excess
            del self._data[:excess]

    def part(self, offset_bytes: int, max_bytes: int) -> tuple[int, bytes]:
        """What there is from a place on, and the place it really begins at."""
        begin = min(max(offset_bytes, self.offset_bytes), self.offset_bytes + len(self._data))
        first = begin - self.offset_bytes
        return begin, bytes(self._data[first : first + max_bytes])


class Process:
    """A started process group. `pipes` maps each open output pipe to what collects it."""

    def __init__(self, process_id: int, pipes: dict[int, HeadAndTail | Log]) -> None:
        self.process_id = process_id
        self.pipes = pipes
        self.collected = list(pipes.values())  # stays when the pipes are closed
        self.started = time.monotonic()
        self.deadline: float | None = None
        self.timed_out = False
        self.exit_code: int | None = None
        self.cpu_seconds = 0.0

    def drain(self, pipe: int) -> bool:
        """Take what a pipe holds. False at its end."""
        while True:
            try:
                data = os.read(pipe, 65_536)
            except BlockingIOError:
                return True
            if not data:
                return False
            self.pipes[pipe].add(data)

    def close_pipes(self) -> None:
        """Take what is left and let go of the pipes, whoever else still holds them."""
        for pipe in self.pipes:
            self.drain(pipe)
            os.close(pipe)
        self.pipes = {}

    @property
    def log(self) -> Log:
        """What a job has printed."""
        log = self.collected[0]
        assert isinstance(log, Log)
        return log

    def signal(self, number: int) -> None:
        """To the whole group, or to a child alone that has not come to its setsid yet."""
        for target in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                target(self.process_id, number)
                return

    def press(self, now: float) -> None:
        """The deadline has passed: TERM the first time, KILL the next."""
        self.signal(signal.SIGKILL if self.timed_out else signal.SIGTERM)
        self.timed_out = True
        self.deadline = now + GRACE_SECONDS


class Session(Process):
    """A shell that waits for commands on `input_pipe` and tells exit codes on `status_pipe`."""

    def __init__(self, process_id: int, output_pipe: int, ends: tuple[int, int]) -> None:
        super().__init__(process_id, {output_pipe: HeadAndTail(0)})
        self.output_pipe = output_pipe
        self.input_pipe, self.status_pipe = ends
        self.request_id: int | None = None

    def begin(self, request: dict, command: bytes) -> None:
        """Give the shell a command."""
        self.drain(self.output_pipe)
        self.request_id = request["id"]
        self.started = time.monotonic()
        self.deadline = self.started + request["timeout_seconds"]
        self.timed_out = False
        self.pipes[self.output_pipe] = HeadAndTail(request["output_cap_bytes"])
        self.collected = [self.pipes[self.output_pipe]]
        quoted = b"'" + command.replace(b"'", b"'\\''") + b"'"
        line = b"command eval %s </dev/null %d>&-; echo $? >&%d\n"
        os.write(
            self.input_pipe, line % (quoted, STATUS_DESCRIPTOR, STATUS_DESCRIPTOR)
        )  # shorter than a pipe holds: the host checks

    def press(self, now: float) -> None:
        """Interrupt the command; a shell that does not come back is ended."""
        self.signal(signal.SIGKILL if self.timed_out else signal.SIGINT)
        self.timed_out = True
        self.deadline = now + GRACE_SECONDS

    def read_status(self) -> int | None:
        """The exit code the shell has told since; None when nothing."""
        try:
            text = os.read(self.status_pipe, 4096)
        except BlockingIOError:
            return None
        lines = text.split()
        return int(lines[-1]) if lines and lines[-1].isdigit() else None

    def close_pipes(self) -> None:
        """The shell's own ends too."""
        super().close_pipes()
        os.close(self.input_pipe)
        os.close(self.status_pipe)


def start_command(
    request: dict, blobs: list[bytes], collectors: list[HeadAndTail | Log]
) -> Process:
    """Start what a request describes; stderr goes its own way when there are two collectors.

    Blobs: folder, stdin, arguments, then NAME=value pairs, as many as the request says.
    """
    folder, text, *rest = blobs
    arguments, variables = rest[: request["arguments"]], rest[request["arguments"] :]
    reads, writes = [], []
    for _ in collectors:
        read_end, write_end = _open_pipe()
        reads.append(read_end)
        writes.append(write_end)
    input_end = os.open("/dev/null", os.O_RDONLY)
    if text:
        os.close(input_end)
        input_end = os.memfd_create("stdin")
        with open(input_end, "wb", closefd=False) as file:
            file.write(text)
        os.lseek(input_end, 0, os.SEEK_SET)
    try:
        ends = {0: input_end, 1: writes[0], 2: writes[-1]}
        process_id = _start(folder, arguments, variables, ends)
    except OSError:
        for read_end in reads:
            os.close(read_end)
        raise
    finally:
        for end in (input_end, *writes):
            os.close(end)
    return Process(process_id, dict(zip(reads, collectors, strict=True)))


def start_session(blobs: list[bytes]) -> Session:
    """Start a shell. Blobs: folder, NAME=value pairs."""
    folder, *variables = blobs
    output_read, output_write = _open_pipe()
    status_read, status_write = _open_pipe()
    input_read, input_write = os.pipe()
    shell = next(path for path in _SHELLS if os.path.exists(path))
    # A trap for INT keeps the shell alive when a command is interrupted; commands get the default.
    arguments = [shell, "--noprofile", "--norc"] if shell.endswith("bash") else [shell]
    ends = {0: input_read, 1: output_write, 2: output_write, STATUS_DESCRIPTOR: status_write}
    try:
        process_id = _start(folder, [item.encode() for item in arguments], variables, ends)
    finally:
        for end in (output_write, status_write, input_read):
            os.close(end)
    os.write(input_write, b"trap : INT\n")
    return Session(process_id, output_read, (input_write, status_read))


def reap_processes() -> dict[int, tuple[int, float]]:
    """Exit code and CPU seconds of all children that ended, adopted ones included."""
    ended: dict[int, tuple[int, float]] = {}
    while True:
        try:
            process_id, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if process_id == 0:
            return ended
        ended[process_id] = (os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime)


def _open_pipe() -> tuple[int, int]:
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    return read_end, write_end


def _start(
    folder: bytes, arguments: list[bytes], variables: list[bytes], ends: dict[int, int]
) -> int:
    """Fork and execute with `ends` as descriptors; the folder must exist (NotADirectoryError)."""
    if not os.path.isdir(folder):
        raise NotADirectoryError(20, "no such folder", os.fsdecode(folder))
    environment = dict(os.environb)
    for variable in variables:
        name, _, value = variable.partition(b"=")
        environment[name] = value
    process_id = os.fork()
    if process_id:
        return process_id
    try:
        os.setsid()
        for number in (signal.SIGPIPE, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        _offer_to_the_memory_killer()
        # High copies first: an end may already have a number that another one is wanted at.
        copies = {wanted: _copy_high(end) for wanted, end in ends.items()}
        for wanted, copy in copies.items():
            os.dup2(copy, wanted)
        os.chdir(folder)
        os.execvpe(arguments[0], arguments, environment)
    except OSError as error:
        os.write(2, f"{os.fsdecode(arguments[0])}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def _copy_high(descriptor: int) -> int:
    import fcntl  # noqa: PLC0415 -- only in the child: keeps the server's start short

    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 64)


def _offer_to_the_memory_killer() -> None:
    """When the box is over its memory, commands go first and the server last.

    Refused where the box was made without rights; there no group limits memory either.
    """
    with contextlib.suppress(PermissionError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def limit_resources(limits: dict) -> None:
    """What this process and all it starts may use."""
    memory = limits["process_memory_bytes"]
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_NPROC, (limits["processes"], limits["processes"]))
