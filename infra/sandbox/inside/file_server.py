"""Process 1 of an agent's box: runs commands, reads and writes files, and puts the repository back.

The event loop and the requests: one thread, one selector, several commands at once. A request names
its operation; paths, arguments and contents travel as blobs, in an order that each operation states
(agent.c answers the same requests but open, diff and reset). What processes do is commands.py, what
files do is files.py. Standard library only: this file runs inside the box.
"""

import contextlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable

from ostinato.infra.sandbox.inside import files
from ostinato.infra.sandbox.inside.commands import (
    HeadAndTail,
    Log,
    Process,
    Session,
    limit_resources,
    reap_processes,
    start_command,
    start_session,
)
from ostinato.infra.sandbox.inside.files import Refused
from ostinato.infra.sandbox.inside.process import kill_everything_else, protect_server
from ostinato.infra.sandbox.inside.tree import Tree, remove_tree
from ostinato.infra.sandbox.inside.wire import FrameDecoder, encode_frame

Reply = tuple[dict, list[bytes]]

_SCRATCH = ("/tmp", "/dev/shm")
_MAX_JOBS = 64


class FileServer:
    """Serves one socket until it closes."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._decoder = FrameDecoder()
        self._commands: dict[int, tuple[dict, Process]] = {}  # exec requests by process id
        self._sessions: dict[int, Session] = {}  # by process id, which is also the session's id
        self._jobs: dict[int, Process] = {}
        self._waiting: list[tuple[dict, float]] = []  # job_wait requests and their deadlines
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
                elif isinstance(key.data, Session):
                    self._finish_session_run(key.data)
                elif key.data is not None:
                    self._drain(key.data, key.fd)
            self._finish_processes()
            self._press_late_ones()

    def _wait_seconds(self) -> float | None:
        deadlines = [process.deadline for _, process in self._commands.values()]
        deadlines += [session.deadline for session in self._sessions.values()]
        deadlines += [deadline for _, deadline in self._waiting]
        nearest = min((deadline for deadline in deadlines if deadline is not None), default=None)
        return None if nearest is None else max(0.0, nearest - time.monotonic())

    def _answer(self, request: dict, blobs: list[bytes]) -> None:
        try:
            reply = getattr(self, f"_do_{request['operation']}")(request, blobs)
            if reply is not None:  # None: answered later
                self._send({"id": request["id"], **reply[0]}, reply[1])
        except (OSError, Refused) as error:
            self._send({"id": request["id"], **_describe(error)}, [])

    def _send(self, header: dict, blobs: list[bytes]) -> None:
        self._control.sendall(encode_frame(header, blobs))

    def _do_hello(self, request: dict, blobs: list[bytes]) -> Reply:
        limit_resources(request)
        return {"server": "python"}, []

    def _do_open(self, request: dict, blobs: list[bytes]) -> Reply:
        """Blobs: contents of `paths`."""
        self._tree = Tree(files.ROOT, dict(zip(request["paths"], blobs, strict=True)))
        limit_resources(request["limits"])
        return {"process_id": os.getpid()}, []

    def _do_read(self, request: dict, blobs: list[bytes]) -> Reply:
        """Blobs: paths. Reply: contents, or messages where `kinds` is not empty."""
        parts = zip(blobs, request["offsets"], request["lengths"], strict=True)
        return _each(
            [
                lambda path=path, offset=offset, length=length: files.read_part(
                    os.fsdecode(path), offset, length
                )
                for path, offset, length in parts
            ]
        )

    def _do_write(self, request: dict, blobs: list[bytes]) -> Reply:
        """Blobs: path, content, expected content, for each file."""
        items = zip(blobs[::3], blobs[1::3], blobs[2::3], request["executable"], strict=True)
        return _each(
            [
                lambda path=path, content=content, expected=expected, mode=mode: files.write_whole(
                    os.fsdecode(path), content, expected.decode(), bool(mode)
                )
                for path, content, expected, mode in items
            ]
        )

    def _do_remove(self, request: dict, blobs: list[bytes]) -> Reply:
        """Blobs: paths."""
        return _each([lambda path=path: files.remove(os.fsdecode(path)) for path in blobs])

    def _do_list(self, request: dict, blobs: list[bytes]) -> Reply:
        """Blobs: a folder. Reply: packed statuses."""
        entries = files.list_below(os.fsdecode(blobs[0]), request["max_depth"])
        return {}, [b"".join(entries)]

    def _do_stat(self, request: dict, blobs: list[bytes]) -> Reply:
        """Blobs: paths. Reply: a packed status, or nothing, for each."""
        return {}, [files.status_of(os.fsdecode(path)) for path in blobs]

    def _do_exec(self, request: dict, blobs: list[bytes]) -> None:
        collectors: list[HeadAndTail | Log] = [
            HeadAndTail(request["output_cap_bytes"]) for _ in range(1 + request["separate"])
        ]
        process = start_command(request, blobs, collectors)
        process.deadline = process.started + request["timeout_seconds"]
        self._commands[process.process_id] = (request, process)
        self._watch(process)

    def _do_job_start(self, request: dict, blobs: list[bytes]) -> Reply:
        process = start_command(request, blobs, [Log()])
        self._watch(process)
        ended = [number for number, job in self._jobs.items() if job.exit_code is not None]
        for number in ended[: max(0, len(self._jobs) - _MAX_JOBS)]:
            del self._jobs[number]
        self._jobs[process.process_id] = process
        return {"job": process.process_id}, []

    def _do_job_logs(self, request: dict, blobs: list[bytes]) -> Reply:
        job = self._job(request)
        for pipe in job.pipes:
            job.drain(pipe)
        return self._job_reply(request, job)

    def _do_job_wait(self, request: dict, blobs: list[bytes]) -> Reply | None:
        job = self._job(request)
        if job.exit_code is not None:
            return self._job_reply(request, job)
        self._waiting.append((request, time.monotonic() + request["timeout_seconds"]))
        return None

    def _do_job_kill(self, request: dict, blobs: list[bytes]) -> Reply:
        job = self._job(request)
        if job.exit_code is None:
            job.signal(request["signal"])
        return {}, []

    def _do_session_open(self, request: dict, blobs: list[bytes]) -> Reply:
        session = start_session(blobs)
        self._sessions[session.process_id] = session
        self._selector.register(session.output_pipe, selectors.EVENT_READ, session)
        self._selector.register(session.status_pipe, selectors.EVENT_READ, session)
        return {"session": session.process_id}, []

    def _do_session_run(self, request: dict, blobs: list[bytes]) -> None:
        session = self._session(request)
        if session.request_id is not None:
            raise Refused("busy", f"session {session.process_id} runs another command")
        try:
            session.begin(request, blobs[0])
        except BrokenPipeError as error:
            session.request_id = None
            raise Refused("not_found", f"session {session.process_id} has ended") from error

    def _do_session_signal(self, request: dict, blobs: list[bytes]) -> Reply:
        self._session(request).signal(request["signal"])
        return {}, []

    def _do_session_close(self, request: dict, blobs: list[bytes]) -> Reply:
        self._session(request).signal(signal.SIGKILL)
        return {}, []

    def _do_pause(self, request: dict, blobs: list[bytes]) -> Reply:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGSTOP)
        return {}, []

    def _do_resume(self, request: dict, blobs: list[bytes]) -> Reply:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGCONT)
        return {}, []

    def _do_diff(self, request: dict, blobs: list[bytes]) -> Reply:
        assert self._tree is not None
        changes = self._tree.changed()
        kept = {path: content for path, content in changes.items() if content is not None}
        removed = [path for path, content in changes.items() if content is None]
        return {"paths": list(kept), "removed": removed}, list(kept.values())

    def _do_reset(self, request: dict, blobs: list[bytes]) -> Reply:
        """Blobs: contents of `paths`."""
        assert self._tree is not None
        kill_everything_else()
        self._forget_processes()
        contents: dict[str, bytes | None] = dict(zip(request["paths"], blobs, strict=True))
        contents.update(dict.fromkeys(request["removed"]))
        self._tree.restore(contents)
        for folder in _SCRATCH:
            for entry in list(os.scandir(folder)):
                remove_tree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(
                    entry.path
                )
        return {}, []

    def _forget_processes(self) -> None:
        waiting = [request["id"] for request, _ in (*self._commands.values(), *self._waiting)]
        for session in self._sessions.values():
            if session.request_id is not None:
                waiting.append(session.request_id)
        processes = [process for _, process in self._commands.values()]
        for process in (*processes, *self._sessions.values(), *self._jobs.values()):
            self._close_pipes(process)
        for request_id in waiting:
            self._send({"id": request_id, "error": "the sandbox was reset", "kind": "other"}, [])
        self._commands.clear()
        self._sessions.clear()
        self._jobs.clear()
        self._waiting.clear()

    def _job(self, request: dict) -> Process:
        if request["job"] not in self._jobs:
            raise Refused("not_found", f"no job {request['job']}")
        return self._jobs[request["job"]]

    def _session(self, request: dict) -> Session:
        if request["session"] not in self._sessions:
            raise Refused("not_found", f"no session {request['session']}, or its shell has ended")
        return self._sessions[request["session"]]

    def _job_reply(self, request: dict, job: Process) -> Reply:
        offset, data = job.log.part(request["offset"], request["length"])
        return {"offset": offset, "exit_code": job.exit_code}, [data]

    def _watch(self, process: Process) -> None:
        for pipe in process.pipes:
            self._selector.register(pipe, selectors.EVENT_READ, process)

    def _drain(self, process: Process, pipe: int) -> None:
        if pipe in process.pipes and not process.drain(pipe):
            self._selector.unregister(pipe)

    def _close_pipes(self, process: Process) -> None:
        pipes = list(process.pipes)
        if isinstance(process, Session):
            pipes.append(process.status_pipe)
        for pipe in pipes:
            with contextlib.suppress(KeyError):
                self._selector.unregister(pipe)
        process.close_pipes()

    def _finish_processes(self) -> None:
        for process_id, (exit_code, cpu_seconds) in reap_processes().items():
            request, command = self._commands.pop(process_id, (None, None))
            process = command or self._sessions.get(process_id) or self._jobs.get(process_id)
            if process is None:
                continue
            process.exit_code, process.cpu_seconds = exit_code, cpu_seconds
            if process_id in self._sessions:
                self._end_session(self._sessions.pop(process_id), exit_code)
                continue
            self._close_pipes(process)
            process.signal(signal.SIGKILL)
            if request is not None:
                self._send(*_report(request["id"], process))
            else:
                self._answer_waiting(process_id, process)

    def _answer_waiting(self, job: int, process: Process) -> None:
        for item in [item for item in self._waiting if item[0]["job"] == job]:
            self._waiting.remove(item)
            header, blobs = self._job_reply(item[0], process)
            self._send({"id": item[0]["id"], **header}, blobs)

    def _end_session(self, session: Session, exit_code: int) -> None:
        session.signal(signal.SIGKILL)
        if session.request_id is not None:
            session.drain(session.output_pipe)
            self._send(*_report(session.request_id, session))
        self._close_pipes(session)

    def _finish_session_run(self, session: Session) -> None:
        """A session's shell printed something or told an exit code."""
        if session.process_id not in self._sessions:
            return
        if not session.drain(session.output_pipe):
            with contextlib.suppress(KeyError):
                self._selector.unregister(session.output_pipe)
        told = session.read_status()
        if told is None or session.request_id is None:
            return
        session.drain(session.output_pipe)
        session.exit_code = told
        self._send(*_report(session.request_id, session))
        session.request_id = session.deadline = None

    def _press_late_ones(self) -> None:
        now = time.monotonic()
        for process in [process for _, process in self._commands.values()] + list(
            self._sessions.values()
        ):
            if process.deadline is not None and process.deadline <= now:
                process.press(now)
        for item in [item for item in self._waiting if item[1] <= now]:
            self._waiting.remove(item)
            text = f"job {item[0]['job']} still runs"
            self._send({"id": item[0]["id"], "error": text, "kind": "timeout"}, [])


def _each(actions: list[Callable[[], bytes | None]]) -> Reply:
    """Do all; the answer of one that fails is its kind and message, the others go on."""
    kinds, blobs = [], []
    for action in actions:
        try:
            blobs.append(action() or b"")
            kinds.append("")
        except (OSError, Refused) as error:
            told = _describe(error)
            kinds.append(told["kind"])
            blobs.append(told["error"].encode())
    return {"kinds": kinds}, blobs


def _describe(error: Exception) -> dict:
    if isinstance(error, Refused):
        return {"error": str(error), "kind": error.kind}
    assert isinstance(error, OSError)
    kind = "invalid"
    if isinstance(error, FileNotFoundError):
        kind = "not_found"
    text = f"{error.strerror or error}: {error.filename or ''}".strip(": ")
    return {"error": text.encode(errors="replace").decode(), "kind": kind}


def _report(request_id: int, process: Process) -> Reply:
    collectors = [item for item in process.collected if isinstance(item, HeadAndTail)]
    header = {
        "id": request_id,
        "exit_code": process.exit_code,
        "truncated": any(item.dropped_bytes for item in collectors),
        "timed_out": process.timed_out,
        "wall_seconds": time.monotonic() - process.started,
        "cpu_seconds": process.cpu_seconds,
    }
    return header, [item.text() for item in collectors]


def main(descriptor: int) -> None:
    """Serve the inherited socket."""
    protect_server()
    control = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    FileServer(control).serve()
