"""Process 1 of an agent's box: runs commands, reads and writes files, and puts the repository back.

Owns the requests open, exec, read, write, list, diff, reset. One thread, one selector: several
commands run at once. Standard library only: this file runs inside the box.
"""

import contextlib
import os
import resource
import selectors
import signal
import socket
import time

from infra.sandbox.inside.process import kill_everything_else, protect_server, reap_children
from infra.sandbox.inside.tree import Tree, read_regular, remove_tree
from infra.sandbox.inside.wire import FrameDecoder, encode_frame

_REPOSITORY = "/repo"
_SCRATCH = ("/tmp", "/dev/shm")
_GRACE_SECONDS = 0.5


class Command:
    """A running command and what it has printed: the first and the last half of its cap."""

    def __init__(self, request: dict, process_id: int, pipe: int) -> None:
        self.request_id = request["id"]
        self.process_id = process_id
        self.pipe = pipe
        self.started = time.monotonic()
        self.deadline = self.started + request["timeout_seconds"]
        self.timed_out = False
        self._half_bytes = request["output_cap_bytes"] // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._dropped_bytes = 0

    def drain(self) -> bool:
        """Take what the pipe holds. False at its end."""
        while True:
            try:
                data = os.read(self.pipe, 65_536)
            except BlockingIOError:
                return True
            if not data:
                return False
            room = self._half_bytes - len(self._head)
            self._head += data[: max(room, 0)]
            self._tail += data[max(room, 0) :]
            excess = len(self._tail) - self._half_bytes
            if excess > 0:
                self._dropped_bytes += excess
                del self._tail[:excess]

    def output(self) -> bytes:
        """Everything, or head and tail around a note."""
        if not self._dropped_bytes:
            return bytes(self._head + self._tail)
        note = f"\n[... {self._dropped_bytes} bytes left out ...]\n".encode()
        return bytes(self._head) + note + bytes(self._tail)

    def report(self, exit_code: int) -> dict:
        """The reply's header."""
        return {
            "id": self.request_id,
            "exit_code": exit_code,
            "truncated": self._dropped_bytes > 0,
            "timed_out": self.timed_out,
            "wall_seconds": time.monotonic() - self.started,
        }


class FileServer:
    """Serves one socket until it closes."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._decoder = FrameDecoder()
        self._commands: dict[int, Command] = {}  # by process id
        self._tree: Tree | None = None
        self._selector = selectors.DefaultSelector()
        wake_read, wake_write = os.pipe()
        for descriptor in (wake_read, wake_write):
            os.set_blocking(descriptor, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self._wake_read = wake_read
        self._selector.register(control, selectors.EVENT_READ, None)
        self._selector.register(wake_read, selectors.EVENT_READ, None)

    def serve(self) -> None:
        """Until the host closes the socket; process 1 then ends and the kernel ends the rest."""
        while True:
            for key, _ in self._selector.select(self._wait_seconds()):
                if key.fileobj is self._control:
                    data = self._control.recv(1 << 18)
                    if not data:
                        return
                    for request, blobs in self._decoder.feed(data):
                        self._answer(request, blobs)
                elif key.fd == self._wake_read:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                elif key.data is not None and not key.data.drain():
                    self._selector.unregister(key.fd)
            self._finish_commands()

    def _wait_seconds(self) -> float | None:
        if not self._commands:
            return None
        return max(
            0.0, min(command.deadline for command in self._commands.values()) - time.monotonic()
        )

    def _answer(self, request: dict, blobs: list[bytes]) -> None:
        operation = request["operation"]
        try:
            if operation == "exec":
                self._start(request)
                return
            header, reply_blobs = getattr(self, f"_do_{operation}")(request, blobs)
        except OSError as error:
            header, reply_blobs = (
                {"error": f"{error.strerror or error}: {error.filename or ''}".strip(": ")},
                [],
            )
        self._send({"id": request["id"], **header}, reply_blobs)

    def _send(self, header: dict, blobs: list[bytes]) -> None:
        self._control.sendall(encode_frame(header, blobs))

    def _do_open(self, request: dict, blobs: list[bytes]) -> tuple[dict, list[bytes]]:
        self._tree = Tree(_REPOSITORY, dict(zip(request["paths"], blobs, strict=True)))
        limits = request["limits"]
        memory = limits["process_memory_bytes"]
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_NPROC, (limits["processes"], limits["processes"]))
        return {"process_id": os.getpid()}, []

    def _do_read(self, request: dict, blobs: list[bytes]) -> tuple[dict, list[bytes]]:
        path = _resolve(request["path"])
        if os.path.isdir(path):
            return {"error": f"{request['path']} is a folder, wanted a file"}, []
        if not os.path.lexists(path):
            return {"error": f"{request['path']} does not exist"}, []
        content = read_regular(path, _devices())
        if content is None:
            return {
                "error": f"{request['path']} is not a regular file of the repository or /tmp"
            }, []
        return {}, [content]

    def _do_write(self, request: dict, blobs: list[bytes]) -> tuple[dict, list[bytes]]:
        path = _resolve(request["path"])
        folder = os.path.dirname(path)
        os.makedirs(folder, exist_ok=True)
        if os.stat(folder).st_dev not in _devices():
            return {"error": f"{request['path']} is outside the repository and /tmp"}, []
        partial = f"{path}.partial"
        with open(partial, "xb") as file:
            file.write(blobs[0])
        os.replace(partial, path)
        return {}, []

    def _do_list(self, request: dict, blobs: list[bytes]) -> tuple[dict, list[bytes]]:
        names = []
        for entry in os.scandir(_resolve(request["path"])):
            if entry.name != "__pycache__":
                names.append(entry.name + ("/" if entry.is_dir() else ""))
        return {"names": sorted(names)}, []

    def _do_diff(self, request: dict, blobs: list[bytes]) -> tuple[dict, list[bytes]]:
        assert self._tree is not None
        changes = self._tree.changed()
        kept = {path: content for path, content in changes.items() if content is not None}
        removed = [path for path, content in changes.items() if content is None]
        return {"paths": list(kept), "removed": removed}, list(kept.values())

    def _do_reset(self, request: dict, blobs: list[bytes]) -> tuple[dict, list[bytes]]:
        assert self._tree is not None
        kill_everything_else()
        for command in self._commands.values():
            self._close_pipe(command)
            self._send({"id": command.request_id, "error": "the sandbox was reset"}, [])
        self._commands.clear()
        files: dict[str, bytes | None] = dict(zip(request["paths"], blobs, strict=True))
        files.update(dict.fromkeys(request["removed"]))
        self._tree.restore(files)
        for folder in _SCRATCH:
            for entry in list(os.scandir(folder)):
                remove_tree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(
                    entry.path
                )
        return {}, []

    def _start(self, request: dict) -> None:
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, write_end, 1),
            (os.POSIX_SPAWN_DUP2, write_end, 2),
        ]
        try:
            process_id = os.posix_spawn(
                "/bin/sh",
                ["sh", "-c", request["command"]],
                os.environ,
                file_actions=actions,
                setsid=True,
                setsigdef=[signal.SIGPIPE, signal.SIGINT],
            )
        except OSError:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        command = Command(request, process_id, read_end)
        self._commands[process_id] = command
        self._selector.register(read_end, selectors.EVENT_READ, command)

    def _finish_commands(self) -> None:
        for process_id, exit_code in reap_children().items():
            command = self._commands.pop(process_id, None)
            if command is not None:
                command.drain()
                self._close_pipe(command)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process_id, signal.SIGKILL)
                self._send(command.report(exit_code), [command.output()])
        now = time.monotonic()
        for command in self._commands.values():
            if command.deadline <= now:
                number = signal.SIGKILL if command.timed_out else signal.SIGTERM
                command.timed_out = True
                command.deadline = now + _GRACE_SECONDS
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(command.process_id, number)

    def _close_pipe(self, command: Command) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(command.pipe)
        os.close(command.pipe)


def _resolve(path: str) -> str:
    return os.path.normpath(os.path.join(_REPOSITORY, path))


def _devices() -> set[int]:
    return {os.stat(_REPOSITORY).st_dev, os.stat("/tmp").st_dev}


def main(descriptor: int) -> None:
    """Serve the inherited socket."""
    protect_server()
    control = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    FileServer(control).serve()
