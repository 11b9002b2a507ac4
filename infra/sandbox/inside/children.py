"""Forked runs of a server inside a box: pipes, deadlines, what each said, their end.

`Run`: one child, believed only as far as an honest run would have said it. `Children`: all of a
server. Runs inside the box.
"""

import contextlib
import os
import selectors
import shutil
import signal
import time
from collections.abc import Callable

from ostinato.infra.sandbox.inside.process import kill_everything_else, read_waited_seconds
from ostinato.infra.sandbox.inside.test_runner import Sender
from ostinato.infra.sandbox.inside.wire import FrameDecoder

_EXIT_SECONDS = 0.05
_EXIT_POLL_SECONDS = 0.0005
_SCRATCH = ("/tmp", "/run", "/dev/shm")
_OUTCOMES = ("passed", "failed", "error", "skipped", "timeout", "missing")


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
                if not isinstance(message["begin"], str):
                    raise ValueError("a start without the name of a test")
                self._begun = message["begin"]
            elif "test" in message:
                if not _is_result(message):
                    raise ValueError("a result without the fields of one")
                self._note(message)
            elif _is_end(message):
                self._done = message
            else:
                raise ValueError("an end without the fields of one")

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


def _is_end(message: dict) -> bool:
    violations = message["violations"]
    return (
        message["done"] is True
        and isinstance(message["route"], str)
        and isinstance(violations, list)
        and all(isinstance(item, str) for item in violations)
        and isinstance(message["seconds"], float)
        and isinstance(message["cpu_seconds"], float)
    )


class Children:
    """The runs of one server. `answer` is called with the reply of each that ended."""

    def __init__(self, control: int, answer: Callable[[dict], None]) -> None:
        self._control = control
        self._answer = answer
        self._runs: dict[int, Run] = {}  # by pipe
        self._selector = selectors.DefaultSelector()
        self._listens = False
        self._unused = _read_traces()
        self._is_spent = False

    def __len__(self) -> int:
        return len(self._runs)

    def start(self, request: dict, become: Callable[[Sender], None]) -> None:
        """Fork a run. `become` is all that the child does."""
        read_end, write_end = os.pipe()
        key = os.urandom(16).hex()
        process_id = os.fork()
        if process_id == 0:
            self._become_child(become, Sender(write_end, key))
        os.close(write_end)
        self._runs[read_end] = Run(request, process_id, read_end, key)
        self._selector.register(read_end, selectors.EVENT_READ)

    def wait(self, *, listens: bool = True) -> bool:
        """Hears children until something happens. Whether the host says something, if it is listened to."""
        if listens != self._listens:
            self._listens = listens
            if listens:
                self._selector.register(self._control, selectors.EVENT_READ)
            else:
                self._selector.unregister(self._control)
        is_asked = False
        for key, _ in self._selector.select(self._wait_seconds()):
            if key.fd == self._control:
                is_asked = True
            else:
                self._hear(self._runs[key.fd])
        now = time.monotonic()
        for run in self._runs.values():
            if not run.killed and run.is_late(now):
                self._kill(run)
        return is_asked

    def _wait_seconds(self) -> float | None:
        deadlines = [run.deadline for run in self._runs.values() if not run.killed]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _become_child(self, become: Callable[[Sender], None], send: Sender) -> None:
        """Never returns. The child keeps nothing that reaches the host but its own pipe."""
        try:
            os.setsid()
            self._selector.close()
            os.close(self._control)
            for other in self._runs:
                os.close(other)
            become(send)
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
        self._answer({**run.reply(), "spent": self._is_spent})

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
            self._is_spent = self._is_spent or not self._is_unused()

    def _is_unused(self) -> bool:
        """Whether the box is as it was before its first run, as far as a run could leave it otherwise."""
        try:
            _empty_scratch()
            return _read_traces() == self._unused
        except (OSError, RecursionError):
            return False

    def _kill(self, run: Run) -> None:
        run.killed = True
        self._signal(run)

    def _signal(self, run: Run) -> None:
        for target in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                target(run.process_id, signal.SIGKILL)


def _empty_scratch() -> None:
    """Remove what runs that have ended left where the next could read it."""
    for folder in _SCRATCH:
        for name in os.listdir(folder):
            path = os.path.join(folder, name)
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)
        os.utime(folder, (0, 0))


def _read_traces() -> list:
    """What a run may leave behind beside files: modes and attributes of folders, connections."""
    found: list = [(os.stat(folder).st_mode, _list_attributes(folder)) for folder in _SCRATCH]
    with open("/proc/net/dev") as file:
        return [*found, file.read()]


def _list_attributes(folder: str) -> list[str]:
    try:
        return os.listxattr(folder)
    except OSError:
        return []
