"""Process 1 of a verdict box: pytest, the package and its tests are imported once, each run is a
fork.

The requests open and run: several runs at once, each a child with a deadline that reports through a
pipe. A child that dies leaves its unreported tests as missing or timed out. Runs inside the box.
"""

import contextlib
import os
import selectors
import shutil
import signal
import socket
import sys
import time
import types
from collections import deque
from collections.abc import Generator

import pytest

from ostinato.infra.sandbox.inside.hot_swap import SwapIndex
from ostinato.infra.sandbox.inside.integrity import TestCodes, take_snapshot
from ostinato.infra.sandbox.inside.process import (
    kill_everything_else,
    protect_server,
    read_waited_seconds,
)
from ostinato.infra.sandbox.inside.sources import MemoryFinder
from ostinato.infra.sandbox.inside.test_runner import (
    Recorder,
    Sender,
    Shared,
    freeze_memory,
    run_child,
)
from ostinato.infra.sandbox.inside.wire import FrameDecoder, encode_frame

_ROOT = "/repo"
_EXIT_SECONDS = 0.05
_EXIT_POLL_SECONDS = 0.0005
_SCRATCH = ("/tmp", "/run", "/dev/shm")
_OUTCOMES = ("passed", "failed", "error", "skipped", "timeout", "missing")
_CANARY = os.path.join(os.path.dirname(__file__), "canary.py")
_PYTEST_ARGUMENTS = [
    f"--rootdir={_ROOT}",
    f"--confcutdir={_ROOT}",
    "--capture=no",
    "--assert=plain",
    "--import-mode=prepend",
    *("-c", os.path.join(os.path.dirname(__file__), "pytest.ini")),
    *("-W", "ignore"),
]
_UNUSED_PLUGINS = (
    "cacheprovider",
    "doctest",
    "junitxml",
    "pastebin",
    "stepwise",
    "faulthandler",
    "logging",
)


class Run:
    """One forked child.

    What it says is believed only in the order an honest run says it: `key` on every frame, a begin
    before each result, one result per test, nothing after the end. All else is a violation.
    """

    def __init__(self, request: dict, process_id: int, pipe: int, key: str) -> None:
        self.request = request
        self._key = key
        self._violations: list[str] = []
        self.process_id = process_id
        self.pipe = pipe
        self.deadline = time.monotonic() + request["time_limit_seconds"]
        self.killed = False
        self._waited_seconds = 0.0
        self._decoder = FrameDecoder()
        self._begun = ""
        self._results: dict[str, dict] = {}
        self._done: dict = {}

    def is_late(self, now: float) -> bool:
        """Whether the time limit is over.

        Time in which the child wanted a CPU and had none does not count.
        """
        if now < self.deadline:
            return False
        waited_seconds = read_waited_seconds(self.process_id)
        self.deadline += waited_seconds - self._waited_seconds
        self._waited_seconds = waited_seconds
        return now >= self.deadline

    def receive(self, data: bytes) -> None:
        """Take what the child reports."""
        for message, _ in self._decoder.feed(data):
            if message.get("key") != self._key:
                self._violations.append("forged result")
            elif self._done:
                self._violations.append("result after the end")
            elif "begin" in message:
                self._begun = message["begin"]
            elif "test" in message:
                if not _is_result(message):
                    raise ValueError("a result without the fields of one")
                self._note(message)
            else:
                self._done = message

    def violate(self, what: str) -> None:
        """Note something that no honest run does."""
        self._violations.append(what)

    def _note(self, message: dict) -> None:
        """One result of one test. A second one, or one of a test that did not begin, is none."""
        test = message["test"]
        if test in self._results:
            self._violations.append(f"duplicate result of {test}")
            self._results[test] = {**message, "outcome": "error"}
            return
        if message["outcome"] == "passed" and self._begun != test:
            self._violations.append(f"result of {test} without its start")
        self._results[test] = message

    def _find_violations(self, outcomes: dict[str, str]) -> list[str]:
        """Violations of the run. One that ends before its canaries proves no pass."""
        found = [*self._violations, *self._done.get("violations", [])]
        if not self._done and outcomes and set(outcomes.values()) == {"passed"}:
            found.append("ended before its canaries")
        return found[:20]

    def reply(self) -> dict:
        """The answer to the host, with an outcome for every requested test."""
        outcomes = dict.fromkeys(self.request["tests"], "missing")
        if not self._done and self._begun and self._begun not in self._results:
            outcomes[self._begun] = "timeout" if self.killed else "error"
        failure = None
        for test, result in self._results.items():
            if test in outcomes:
                outcomes[test] = result["outcome"]
                if failure is None and result["failure"] is not None:
                    failure = {"test_id": test, **result["failure"]}
        details = {
            test: {
                "seconds": result["seconds"],
                "idle_seconds": result.get("idle_seconds", 0.0),
                "num_calls": result.get("num_calls", 0),
                "called": result.get("called", []),
            }
            for test, result in self._results.items()
        }
        return {
            "id": self.request["id"],
            "outcomes": outcomes,
            "failure": failure,
            "route": self._done.get("route", "killed"),
            "violations": self._find_violations(outcomes),
            "seconds": self._done.get("seconds", 0.0),
            "cpu_seconds": self._done.get("cpu_seconds", 0.0),
            "finished": bool(self._done),
            "details": details if self.request.get("profile") or self.request.get("timed") else {},
        }


def _is_result(message: dict) -> bool:
    failure = message["failure"]
    return (
        isinstance(message["test"], str)
        and message["outcome"] in _OUTCOMES
        and isinstance(message["seconds"], float)
        and (failure is None or failure.keys() == {"error_type", "message", "frames"})
    )


class ForkServer:
    """A pytest plugin whose test loop serves the host instead of running everything."""

    def __init__(
        self, control: socket.socket, decoder: FrameDecoder, finder: MemoryFinder, opening: dict
    ) -> None:
        self._control = control
        self._decoder = decoder
        self._finder = finder
        self._opening = opening
        self._ran_on_import: set[types.CodeType] = set()
        self._collection_errors: list[str] = []
        self.load_error: dict[str, str] | None = None
        self._waiting: deque[tuple[dict, dict[str, bytes | None]]] = deque()
        self._runs: dict[int, Run] = {}  # by pipe
        self._selector = selectors.DefaultSelector()

    @pytest.hookimpl(wrapper=True)
    def pytest_load_initial_conftests(self) -> Generator[None, None, None]:
        """Remember why a conftest.py could not be imported: then pytest ends before it serves."""
        try:
            return (yield)
        except BaseException as error:
            cause = error.__cause__ or error
            self.load_error = {"error_type": type(cause).__name__, "message": str(cause)[:400]}
            raise

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Remember what could not be imported."""
        if report.failed:
            self._collection_errors.append(f"{report.nodeid}: {str(report.longrepr)[-400:]}")

    def pytest_internalerror(self, excrepr: object) -> None:
        """Remember why pytest gave up, for the message of the process's end."""
        self._collection_errors.append(str(excrepr)[-1500:])

    def pytest_collection(self) -> None:
        """Notes functions that run during import. Those cannot be swapped later."""
        ran, root = self._ran_on_import, _ROOT + "/"

        def note(frame: types.FrameType, event: str, argument: object) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(root):
                ran.add(frame.f_code)

        sys.setprofile(note)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Answer the host until it closes the socket."""
        sys.setprofile(None)
        canaries = [item for item in session.items if str(item.path) == _CANARY]
        items = {item.nodeid: item for item in session.items if str(item.path) != _CANARY}
        recorder = Recorder(_ROOT, test_codes=TestCodes(_ROOT, items))
        session.config.pluginmanager.register(recorder, "ostinato-recorder")
        shared = Shared(
            session=session,
            finder=self._finder,
            index=SwapIndex.build(_ROOT, self._finder.sources, self._ran_on_import),
            items=items,
            canaries=canaries,
            snapshot=take_snapshot(session.config.pluginmanager),
            recorder=recorder,
            limits=self._opening["limits"],
        )
        freeze_memory()
        self._send(
            {
                "id": self._opening["id"],
                "tests": list(items),
                "collection_errors": self._collection_errors,
                "load_error": None,
            }
        )
        self._serve(shared)
        return True

    def _serve(self, shared: Shared) -> None:
        self._selector.register(self._control, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select(self._wait_seconds()):
                if key.fileobj is self._control:
                    data = self._control.recv(1 << 18)
                    if not data:
                        os._exit(0)
                    for request, blobs in self._decoder.feed(data):
                        changed: dict[str, bytes | None] = dict(
                            zip(request["paths"], blobs, strict=True)
                        )
                        changed.update(dict.fromkeys(request["removed"]))
                        self._waiting.append((request, changed))
                else:
                    self._hear(self._runs[key.fd])
            now = time.monotonic()
            for run in self._runs.values():
                if not run.killed and run.is_late(now):
                    self._kill(run)
            while self._waiting and len(self._runs) < self._opening["parallel_runs"]:
                self._fork(shared, *self._waiting.popleft())

    def _wait_seconds(self) -> float | None:
        deadlines = [run.deadline for run in self._runs.values() if not run.killed]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _fork(self, shared: Shared, request: dict, changed: dict[str, bytes | None]) -> None:
        read_end, write_end = os.pipe()
        key = os.urandom(16).hex()
        process_id = os.fork()
        if process_id == 0:
            self._become_child(shared, request, changed, Sender(write_end, key))
        os.close(write_end)
        self._runs[read_end] = Run(request, process_id, read_end, key)
        self._selector.register(read_end, selectors.EVENT_READ)

    def _become_child(
        self, shared: Shared, request: dict, changed: dict[str, bytes | None], send: Sender
    ) -> None:
        """Never returns. The child keeps nothing that reaches the host but its own pipe."""
        try:
            os.setsid()
            self._selector.close()
            self._control.close()
            for other in self._runs:
                os.close(other)
            with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")
            run_child(shared, request, changed, send)
        finally:
            os._exit(0)

    def _hear(self, run: Run) -> None:
        data = os.read(run.pipe, 1 << 18)
        if data:
            try:
                run.receive(data)
                return
            except (ValueError, KeyError, TypeError, RecursionError):
                run.violate("unreadable result")
                self._kill(run)
        self._selector.unregister(run.pipe)
        os.close(run.pipe)
        del self._runs[run.pipe]
        self._end_child(run)
        self._send(run.reply())

    def _end_child(self, run: Run) -> None:
        ended, status = 0, 0
        patience = time.monotonic() + _EXIT_SECONDS
        while not ended and time.monotonic() < patience:
            ended, status = os.waitpid(run.process_id, os.WNOHANG)
            if not ended:
                time.sleep(_EXIT_POLL_SECONDS)  # a child takes milliseconds to give its memory back
        self._signal(run)
        if not ended:
            _, status = os.waitpid(run.process_id, 0)
        if os.waitstatus_to_exitcode(status) in (-signal.SIGXCPU, -signal.SIGKILL):
            run.killed = True
        if not self._runs:
            kill_everything_else()
            _empty_scratch()

    def _kill(self, run: Run) -> None:
        run.killed = True
        self._signal(run)

    def _signal(self, run: Run) -> None:
        for target in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                target(run.process_id, signal.SIGKILL)

    def _send(self, header: dict) -> None:
        self._control.sendall(encode_frame(header))


def _receive_opening(control: socket.socket) -> tuple[FrameDecoder, dict, MemoryFinder] | None:
    """The first request. Its sources are the finder's alone: no frame below the tests has them."""
    decoder = FrameDecoder()
    frames: list[tuple[dict, list[bytes]]] = []
    while not frames:
        data = control.recv(1 << 18)
        if not data:
            return None
        frames = decoder.feed(data)
    opening, blobs = frames[0]
    return decoder, opening, MemoryFinder(_ROOT, dict(zip(opening["paths"], blobs, strict=True)))


def _empty_scratch() -> None:
    """Remove what runs that have ended left where the next could read it."""
    for folder in _SCRATCH:
        for name in os.listdir(folder):
            path = os.path.join(folder, name)
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                os.unlink(path)


def main(descriptor: int) -> None:
    """Receive the repository, import it and serve."""
    protect_server()
    control = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    received = _receive_opening(control)
    if received is None:
        return
    decoder, opening, finder = received
    sys.meta_path.insert(0, finder)
    sys.path.insert(0, _ROOT)
    plugins = [argument for name in _UNUSED_PLUGINS for argument in ("-p", f"no:{name}")]
    tests = [os.path.join(_ROOT, path) for path in opening["test_paths"]]
    server = ForkServer(control, decoder, finder, opening)
    try:
        code = pytest.main([*_PYTEST_ARGUMENTS, *plugins, _CANARY, *tests], plugins=[server])
    finally:
        if server.load_error is not None:
            told = {"tests": [], "collection_errors": [], "load_error": server.load_error}
            control.sendall(encode_frame({"id": opening["id"], **told}))
    raise SystemExit(
        f"pytest ended with {code!r} before serving: {' | '.join(server._collection_errors[:3])}"
    )
