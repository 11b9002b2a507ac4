"""Forked test runs of the server in a box: pipes, deadlines, results and the check of their order.

`Run` is one child. `Runs` starts and finishes the children of a server. Runs inside the box.
"""

import os
import select
import signal
import time

from ostinato.infra.sandbox.inside.apart import KILLED, SETUP_FAILED, fork_apart
from ostinato.infra.sandbox.inside.cpu_waits import read_waited_seconds
from ostinato.infra.sandbox.inside.test_runner import Sender
from ostinato.infra.sandbox.inside.wire import FrameDecoder

_EXIT_SECONDS = 0.05
_EXIT_POLL_SECONDS = 0.0005
_OUTCOMES = ("passed", "failed", "error", "skipped", "timeout", "missing")


class Run:
    """One forked child.

    Its messages are accepted only in the order of an honest run: `key` in every frame, a begin before each
    result, one result per test, nothing after the end. Anything else is a violation.
    """

    def __init__(self, request: dict, process_id: int, pipe: int, key: str) -> None:
        self.request = request
        self._key = key
        self.violations: list[str] = []  # what no honest run does
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
        """Whether the time limit has passed. Time for which the child waited for a CPU does not count."""
        if now < self.deadline:
            return False
        waited_seconds = read_waited_seconds(_child_of(self.process_id))
        self.deadline += waited_seconds - self._waited_seconds
        self._waited_seconds = waited_seconds
        return now >= self.deadline

    def receive(self, data: bytes) -> None:
        """Processes bytes from the child's pipe."""
        for message, _ in self._decoder.feed(data):
            if message.get("key") != self._key:
                self.violations.append("forged result")
            elif self._done:
                self.violations.append("result after the end")
            elif "begin" in message:
                if not isinstance(message["begin"], str):
                    raise ValueError("a begin without the name of a test")
                self._begun = message["begin"]
            elif "test" in message:
                if not _is_result(message):
                    raise ValueError("a result with missing or wrong fields")
                self._note(message)
            elif _is_end(message):
                self._done = message
            else:
                raise ValueError("an end with missing or wrong fields")

    def kill(self) -> None:
        """Kills the child and all that it started."""
        self.killed = True
        os.kill(self.process_id, signal.SIGKILL)

    def end(self) -> None:
        """Waits briefly for the child's end, then kills it if it still runs."""
        ended, status = 0, 0
        deadline = time.monotonic() + _EXIT_SECONDS
        while not ended and time.monotonic() < deadline:
            ended, status = os.waitpid(self.process_id, os.WNOHANG)
            if not ended:
                time.sleep(_EXIT_POLL_SECONDS)  # a child takes milliseconds to free its memory
        if not ended:
            os.kill(self.process_id, signal.SIGKILL)
            _, status = os.waitpid(self.process_id, 0)
        code = os.waitstatus_to_exitcode(status)
        if code == SETUP_FAILED:
            raise RuntimeError("the namespaces of a test run could not be set up")
        self.killed = self.killed or code in (KILLED, -signal.SIGKILL)

    def _note(self, message: dict) -> None:
        """Stores the result of a test. A second result and a pass without a begin are violations."""
        test = message["test"]
        if test in self._results:
            self.violations.append(f"duplicate result of {test}")
            self._results[test] = {**message, "outcome": "error"}
            return
        if message["outcome"] == "passed" and self._begun != test:
            self.violations.append(f"result of {test} without its start")
        self._results[test] = message

    def _find_violations(self, outcomes: dict[str, str]) -> list[str]:
        """Violations of the run. To pass all tests and end before the canaries is one too."""
        found = [*self.violations, *self._done.get("violations", [])]
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
            "collected": self._done.get("collected"),
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


class Runs:
    """Starts and finishes the runs of one server, one at a time."""

    def __init__(self, control: int, allowed: bytes, limits: dict, written_folder: str) -> None:
        """`allowed`: the system call filter. `written_folder`: as for `fork_apart`."""
        self._control = control
        self._allowed = allowed
        self._limits = limits
        self._written_folder = written_folder

    def start(self, request: dict) -> Run | Sender:
        """Forks a run. Returns a Run in the server, and in the child a Sender, its only way to report."""
        read_end, write_end = os.pipe()
        key = os.urandom(16).hex()
        process_id = fork_apart(self._allowed, self._limits["writable_bytes"], self._written_folder)
        if process_id == 0:
            os.close(self._control)
            os.close(read_end)
            return Sender(write_end, key)
        os.close(write_end)
        return Run(request, process_id, read_end, key)

    def finish(self, run: Run) -> dict:
        """The reply to a run, after it ended or was killed at its time limit and no process of it is left."""
        while True:
            left = max(0.0, run.deadline - time.monotonic())
            if select.select([run.pipe], [], [], _EXIT_SECONDS if run.killed else left)[0]:
                data = os.read(run.pipe, 1 << 18)
                if not data:
                    break
                try:
                    run.receive(data)
                except (ValueError, KeyError, TypeError, RecursionError):
                    run.violations.append("unreadable result")
                    run.kill()
                    break
            elif run.killed:
                break
            if not run.killed and run.is_late(time.monotonic()):
                run.kill()
        os.close(run.pipe)
        run.end()
        return run.reply()


def _child_of(process_id: int) -> int:
    """Id of the only child of a process, or of the process itself if it has none."""
    line = f"PPid:\t{process_id}\n"
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/status") as file:
                if line in file.read():
                    return int(name)
        except OSError:
            continue
    return process_id
