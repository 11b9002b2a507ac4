"""Commands and folders of a rented box (infra/serving/sandboxes), for the host at the other end of a Unix socket.

Standard library only: this file runs in the box. Requests and replies are frames (wire.py). The pipes of a command come
from the host with its request, so no input or output passes through this process, which ends with its connection.
"""

import datetime
import os
import selectors
import shutil
import signal
import socket
import stat
import subprocess

from ostinato.infra.sandbox.inside.wire import FrameDecoder, encode_frame

HOME = "/repo"
MAX_ENTRIES = 10_000
MAX_REPLY_BYTES = 8 << 20
_READ_BYTES = 1 << 16
_MAX_DESCRIPTORS = 16


class _Refusal(Exception):
    """A refused request: a code of the Connect protocol and a message."""


def _place(path: str) -> str:
    return os.path.join(HOME, path)


def _describe(path: str) -> dict:
    """A file as `filesystem.EntryInfo` in JSON. A link has the kind of its target."""
    status = os.lstat(path)
    entry = {
        "name": os.path.basename(path.rstrip("/")) or "/",
        "path": path,
        "size": status.st_size,
        "mode": stat.S_IMODE(status.st_mode),
        "permissions": stat.filemode(status.st_mode),
        "owner": "user" if status.st_uid == os.getuid() else str(status.st_uid),
        "group": "user" if status.st_gid == os.getgid() else str(status.st_gid),
    }
    changed = datetime.datetime.fromtimestamp(status.st_mtime, datetime.UTC)
    entry["modifiedTime"] = changed.isoformat().replace("+00:00", "Z")
    mode = status.st_mode
    if stat.S_ISLNK(mode):
        entry["symlinkTarget"], entry["isSymlink"] = os.readlink(path), True
        mode = os.stat(path).st_mode if os.path.exists(path) else mode
    kinds = {stat.S_IFREG: "FILE", stat.S_IFDIR: "DIRECTORY", stat.S_IFLNK: "SYMLINK"}
    entry["type"] = f"FILE_TYPE_{kinds.get(stat.S_IFMT(mode), 'UNSPECIFIED')}"
    return entry


def _walk(folder: str, depth: int, found: list) -> list:
    for name in sorted(os.listdir(folder)):
        if len(found) >= MAX_ENTRIES:
            raise _Refusal("resource_exhausted", f"over {MAX_ENTRIES} entries at {folder}")
        path = os.path.join(folder, name)
        try:
            found.append(_describe(path))
        except FileNotFoundError:  # removed meanwhile
            continue
        if depth > 1 and os.path.isdir(path) and not os.path.islink(path):
            _walk(path, depth - 1, found)
    return found


class CommandServer:
    """Answers requests of the host, one after the other, and reports the end of each command."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._decoder = FrameDecoder()
        self._descriptors: list[int] = []  # received, not yet taken by a request
        self._running: dict[int, subprocess.Popen] = {}
        self._operations = {
            "start": self._start,
            "signal": self._signal,
            "stat": self._stat,
            "list": self._list,
            "make": self._make,
            "move": self._move,
            "remove": self._remove,
        }
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)

    def serve(self) -> None:
        """Returns when the host closes the connection."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._connection:
                    self._report_end(key.fd, *key.data)
                elif not self._receive():
                    return

    def _receive(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self._connection, _READ_BYTES, _MAX_DESCRIPTORS)
        self._descriptors += descriptors
        for header, _ in self._decoder.feed(data):
            try:
                answer = self._operations[header["operation"]](**header)
            except _Refusal as refusal:
                answer = {"error": refusal.args}
            except FileNotFoundError as error:
                answer = {"error": ("not_found", str(error))}
            except Exception as error:  # noqa: BLE001 - a wrong request must not end the box
                answer = {"error": ("invalid_argument", f"{type(error).__name__}: {error}")}
            if len(frame := encode_frame({"id": header["id"], **answer})) > MAX_REPLY_BYTES:
                text = f"answer of {len(frame)} bytes, at most {MAX_REPLY_BYTES} are sent"
                frame = encode_frame({"id": header["id"], "error": ("resource_exhausted", text)})
            self._connection.sendall(frame)
        return bool(data)

    def _report_end(self, descriptor: int, key: int, command: subprocess.Popen) -> None:
        self._selector.unregister(descriptor)
        os.close(descriptor)
        del self._running[command.pid]
        self._connection.sendall(encode_frame({"ended": key, "code": command.wait()}))

    def _start(
        self, key: int, cmd: str, args: list, envs: dict, cwd: str, streams: list, **_: object
    ) -> dict:
        """Starts a command in a session of its own. `streams`: names of those that come as descriptors; `key`: the
        host's number of the command.
        """
        taken = [self._descriptors.pop(0) for _ in streams]
        given = dict(zip(streams, taken, strict=True))
        try:
            if not os.path.isdir(_place(cwd)):
                raise _Refusal("invalid_argument", f"cwd {_place(cwd)} is not a folder")
            command = subprocess.Popen(
                [cmd, *args],
                env={**os.environ, **envs},
                cwd=_place(cwd),
                start_new_session=True,
                stdin=given.get("stdin", subprocess.DEVNULL),
                stdout=given["stdout"],
                stderr=given["stderr"],
            )
        finally:
            for descriptor in taken:
                os.close(descriptor)
        self._running[command.pid] = command
        ended = os.pidfd_open(command.pid)
        self._selector.register(ended, selectors.EVENT_READ, (key, command))
        return {"pid": command.pid}

    def _signal(self, pid: int, number: int, **_: object) -> dict:
        """Signals a command and what it started in its process group."""
        if pid not in self._running:
            raise _Refusal("not_found", f"no command with pid {pid}")
        os.killpg(pid, signal.Signals(number))
        return {}

    def _stat(self, path: str, **_: object) -> dict:
        """Facts of a file."""
        return {"entry": _describe(_place(path))}

    def _list(self, path: str, depth: int = 1, **_: object) -> dict:
        """Entries below a folder."""
        if not os.path.isdir(_place(path)) and os.path.exists(_place(path)):
            raise _Refusal("invalid_argument", f"{_place(path)} is not a folder")
        return {"entries": _walk(_place(path), max(depth, 1), [])}

    def _make(self, path: str, **_: object) -> dict:
        """Makes a folder with those above it."""
        if os.path.isdir(_place(path)):
            raise _Refusal("already_exists", f"folder {_place(path)} exists")
        os.makedirs(_place(path))
        return self._stat(path)

    def _move(self, source: str, destination: str, **_: object) -> dict:
        """Renames a file or folder."""
        os.lstat(_place(source))
        os.makedirs(os.path.dirname(_place(destination).rstrip("/")), exist_ok=True)
        shutil.move(_place(source), _place(destination))
        return self._stat(destination)

    def _remove(self, path: str, **_: object) -> dict:
        """Removes a file or a folder with all in it."""
        place = _place(path)
        if os.path.isdir(place) and not os.path.islink(place):
            shutil.rmtree(place)
        elif os.path.lexists(place):
            os.unlink(place)
        return {}


def main(path: str) -> None:
    """Connects to the host's socket and serves."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    connection.set_inheritable(False)
    CommandServer(connection).serve()
